"""``make clients``: programs and libraries that use torch.distributed.rpc, run on torch and on arpc, and compared.

::

    python -m scripts.clients                      # all of them: a few minutes
    python -m scripts.clients -k torchrl -v        # those that match, with what failed
    python -m scripts.clients --repeat 3           # three runs each, and the least CPU time of the three

The programs are in tests/compat/scripts. Each is run by the same command twice, the second time behind ``python -m
arpc.compat``, in three processes. The result of every process must be the same, except for rounding of numbers.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent

SELF_WRITTEN: Final = ("parameter_server", "batch_rpc", "rnn", "reinforcement", "ddp_rpc", "pipeline")
"""Programs that need torch and nothing else."""

PROGRAMS: Final = {
    **dict.fromkeys(SELF_WRITTEN, "torch"),
    "tensordict_rpc": "tensordict",
    "torchrl_buffer": "torchrl",
    "torchrl_collectors": "torchrl",
    "torchrl_collectors_async": "torchrl",
    "geometric_context": "torch_geometric",
    "geometric_stores": "torch_geometric",
}
"""Every program, and the distribution whose use of RPC it tests."""

BACKENDS: Final[Mapping[str, Sequence[str]]] = {"torch": (), "arpc": ("-m", "arpc.compat", "-q")}
"""The arguments before the program on the command line."""


@dataclass
class Outcome:
    """The outcome of a program on one backend."""

    results: dict[int, Any] = field(default_factory=dict)
    """The results by rank."""
    cpu_s: float = math.inf
    """The CPU time of all processes, from before `init_rpc` to after `shutdown`."""
    failure: str = ""


@dataclass
class Row:
    """The outcomes of a program on both backends."""

    program: str
    package: str
    torch: Outcome
    arpc: Outcome

    @property
    def verdict(self) -> str:
        failed = [name for name, outcome in (("torch", self.torch), ("arpc", self.arpc)) if outcome.failure]
        if failed:
            return f"fails on {' and '.join(failed)}"
        return "same" if is_close(self.torch.results, self.arpc.results) else "differs"


def main(given: Sequence[str] | None = None) -> int:
    """Run the chosen programs, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description="Run clients of torch.distributed.rpc on torch and on arpc.")
    parser.add_argument("-k", dest="pattern", default="", help="only programs whose name or package matches")
    parser.add_argument("--repeat", type=int, default=1, help="so many runs each: the CPU time is the least of them")
    parser.add_argument("--limit", type=int, default=180, help="seconds for one run")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "clients.json", help="what was found, as JSON")
    parser.add_argument("-v", "--verbose", action="store_true", help="show what failed and what differs")
    options = parser.parse_args(given)
    rows: list[Row] = []
    for program, package in PROGRAMS.items():
        if not re.search(options.pattern, f"{program} {package}"):
            continue
        print(f"{program} ...", file=sys.stderr, flush=True)
        outcomes = {backend: repeated(backend, program, options.repeat, options.limit) for backend in BACKENDS}
        rows.append(Row(program, package, **outcomes))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps([{"verdict": row.verdict, **asdict(row)} for row in rows], indent=1))
    print_table(rows, is_verbose=options.verbose)
    return 0 if rows and all(row.verdict == "same" for row in rows) else 1


def repeated(backend: str, program: str, times: int, limit_s: float) -> Outcome:
    """Run a program `times` times, or until it fails. Different results of two runs are a failure, too."""
    best = run(backend, [program], limit_s)[program]
    for _ in range(times - 1):
        outcome = run(backend, [program], limit_s)[program]
        if best.failure or outcome.failure:
            return best if best.failure else outcome
        if not is_close(best.results, outcome.results):
            return Outcome(outcome.results, failure=f"another result in another run: {best.results}")
        best.cpu_s = min(best.cpu_s, outcome.cpu_s)
    return best


def run(backend: str, programs: Sequence[str], limit_s: float) -> dict[str, Outcome]:
    """Run programs one after the other; return the outcome of each."""
    for _ in range(3):
        pairs = [f"{program}={port}" for program, port in zip(programs, free_ports(len(programs)), strict=True)]
        command = [sys.executable, *BACKENDS[backend], "-m", "tests.compat.scripts.launch", *pairs]
        try:
            done = subprocess.run(
                command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            return {program: Outcome(failure=f"not done after {limit_s} s") for program in programs}
        # between the choice of a port and its use another process may take it
        if not done.returncode or "Address already in use" not in done.stderr:
            break
    outcomes: dict[str, Outcome] = {}
    for line in done.stdout.splitlines():
        if line.startswith('{"program"'):
            told = json.loads(line)
            outcome = outcomes.setdefault(told["program"], Outcome(cpu_s=0))
            outcome.results[told["rank"]] = told["results"]
            outcome.cpu_s += told["cpu_s"]
    for program in programs:
        # a process may fail after it has printed its results: that is a failure of the last program that began
        is_last = program == next((name for name in reversed(programs) if name in outcomes), programs[0])
        if program not in outcomes or (done.returncode and is_last):
            outcomes[program] = Outcome(failure=f"exit code {done.returncode}\n{done.stderr[-4000:]}")
    return outcomes


def environment() -> dict[str, str]:
    """Return the environment of programs: one thread for arithmetic per process, and this tree first on the path."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "USE_LIBUV": "0", "PYTHONWARNINGS": "ignore"}


def free_ports(count: int) -> list[int]:
    """Return ports that are free now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def is_close(one: Any, other: Any) -> bool:
    """Whether results are the same, numbers within the error of single precision and another order of sums."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-8)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_close(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_close, one, other))
    return type(one) is type(other) and bool(one == other)


def print_table(rows: Sequence[Row], *, is_verbose: bool) -> None:
    """Print a line for each program, and below the versions of Python and the packages."""
    print(f"\n{'program':26} {'client':16} {'result':20} {'CPU s: torch':>12} {'arpc':>7}")
    for row in rows:
        times = [f"{outcome.cpu_s:.2f}" if outcome.cpu_s < math.inf else "-" for outcome in (row.torch, row.arpc)]
        print(f"{row.program:26} {row.package:16} {row.verdict:20} {times[0]:>12} {times[1]:>7}")
    print(f"{'all':26} {'':16} {sum(row.verdict == 'same' for row in rows)} of {len(rows)} the same")
    versions = {name: version_of(name) for name in dict.fromkeys(["torch", *(row.package for row in rows)])}
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(f"\nPython {platform.python_version()}, {told}")
    if is_verbose:
        for row in rows:
            if row.verdict != "same":
                print(f"\n{row.program}\n  torch: {row.torch}\n  arpc: {row.arpc}")


def version_of(distribution: str) -> str:
    """Return the installed version of a distribution, if it is installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
