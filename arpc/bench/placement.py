"""The CPUs on which a pair of processes runs. Placement decides latency, so every row states it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

from arpc.bench.processes import family

__all__ = ["Placement", "can_split", "cpus_of", "place"]

Placement = Literal["free", "same", "split"]
"""``free``: as the kernel schedules them; ``same``: caller and callee on one CPU; ``split``: one CPU each."""

# Only Linux can pin; elsewhere this module can be imported, so that the command can report that.
_AVAILABLE = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]


def can_split() -> bool:
    """Whether this process may use two CPUs."""
    return len(_AVAILABLE) > 1


def cpus_of(placement: Placement) -> tuple[set[int], set[int]]:
    """Return the CPUs of caller and callee."""
    match placement:
        case "free":
            return set(_AVAILABLE), set(_AVAILABLE)
        case "same":
            return {_AVAILABLE[0]}, {_AVAILABLE[0]}
        case "split":
            return {_AVAILABLE[0]}, {_AVAILABLE[1]}


def place(placement: Placement, *, caller_pid: int, callee_pid: int) -> None:
    """Move both processes of a pair, with all their threads and all processes that they have started."""
    for leader, cpus in zip((caller_pid, callee_pid), cpus_of(placement), strict=True):
        for pid in family([leader]):
            _pin(pid, cpus)


def _pin(pid: int, cpus: set[int]) -> None:
    """Pin every thread of a process to `cpus`. Threads that they start later inherit it."""
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), cpus)
