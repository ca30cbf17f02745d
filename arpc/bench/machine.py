"""A description of the machine, and how steady it was during the run."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Iterable
from pathlib import Path

from arpc._version import __version__
from arpc.bench.processes import family

__all__ = ["ForeignLoad", "Steadiness", "describe_machine"]

PROBE_STEPS = 50_000
UNSTEADY_SPREAD = 1.3


class ForeignLoad:
    """The share of the machine's CPU time, since this was made, that processes outside one family have used."""

    def __init__(self, leaders: Iterable[int]) -> None:
        self._leaders = tuple(leaders)
        self._started = time.perf_counter()
        self._machine_before = _busy_ticks()
        self._own_before = self._own_ticks()

    def share(self) -> float:
        own = sum(ticks - self._own_before.get(pid, 0) for pid, ticks in self._own_ticks().items())
        elapsed_ticks = (time.perf_counter() - self._started) * os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1)
        return max(0.0, (_busy_ticks() - self._machine_before - own) / elapsed_ticks)

    def _own_ticks(self) -> dict[int, int]:
        return {pid: _process_ticks(pid) for pid in family(self._leaders)}


class Steadiness:
    """Probes how fast this machine runs the same short loop over time, and how much CPU time was stolen."""

    def __init__(self) -> None:
        self._probes_s: list[float] = []
        self._ticks_before = _machine_ticks()

    def probe(self) -> None:
        started = time.perf_counter()
        total = 0
        for step in range(PROBE_STEPS):
            total += step
        self._probes_s.append(time.perf_counter() - started)

    @property
    def spread(self) -> float:
        """The ninth decile of the probes over the first: 1 on a machine without any other load."""
        if len(self._probes_s) < 2:
            return 1.0
        deciles = statistics.quantiles(self._probes_s, n=10, method="inclusive")  # never below the best of few
        return deciles[-1] / deciles[0]

    @property
    def stolen_share(self) -> float:
        """The share of CPU time that the hypervisor gave to other guests."""
        before, after = self._ticks_before, _machine_ticks()
        elapsed = sum(after) - sum(before)
        return (after[-1] - before[-1]) / elapsed if elapsed else 0.0

    def describe(self) -> str:
        verdict = "steady" if self.spread < UNSTEADY_SPREAD else "not steady: trust ratios, not figures"
        return (
            f"Machine: {verdict}. The same short loop took up to {self.spread:.2f} times as long as at its best;"
            f" {self.stolen_share:.1%} of the CPU time was stolen."
        )


def describe_machine() -> dict[str, object]:
    """Return the facts that readers need to compare these figures with their own."""
    versions = {"arpc": __version__}
    peers = ("dask", "distributed", "grpcio", "ray", "rpyc", "torchmonarch", "xoscar")
    for package in ("torch", "uvloop", "numpy", *peers):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _machine_ticks() -> list[int]:
    """Return user, nice, system, idle, wait, irq, softirq and stolen time of all CPUs, see proc(5)."""
    return [int(part) for part in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]


def _busy_ticks() -> int:
    # Interrupts are left out: on loopback they are work of the measured processes, billed to no process.
    user, nice, system, _idle, _wait, _irq, _softirq, stolen = _machine_ticks()
    return user + nice + system + stolen


def _process_ticks(pid: int) -> int:
    """Return user and system time of all threads of a process, ended ones included; 0 if the process has ended."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(after_name[11]) + int(after_name[12])
