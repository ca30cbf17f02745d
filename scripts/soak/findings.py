"""What the runner did to the workers, and what it saw: the times of faults, deaths, what was left, memory."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from scripts.soak.workers import OPTIONS

__all__ = ["RECOVERY_S", "FaultWindow", "FaultWindows", "Findings"]

RECOVERY_S: Final = OPTIONS.heartbeat_timeout + OPTIONS.connect_timeout + OPTIONS.rref_grace + 4.0
"""How long after a fault errors may be its consequence."""


class FaultWindow(NamedTuple):
    """A fault was at work on a worker from ``begin`` to ``end``, and had consequences for a while."""

    worker: str
    begin: float
    end: float
    recovery_s: float = RECOVERY_S


@dataclass
class Findings:
    """What the soak has shown, besides the event logs."""

    faults: Counter[str] = field(default_factory=Counter)
    windows: list[FaultWindow] = field(default_factory=list)
    killed_at: dict[str, float] = field(default_factory=dict)
    """When processes (``name.start``) got a SIGKILL."""
    crashes: list[tuple[str, int | None]] = field(default_factory=list)
    """Processes that ended although nothing was done to them, with their exit codes."""
    failures: list[str] = field(default_factory=list)
    """What the runner could not do."""
    left: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What workers still had in the end, by name."""
    tables: dict[str, dict[str, int]] = field(default_factory=dict)
    """Sizes of large tables in the end, by worker."""
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """Resident bytes of each process over time."""
    codes: list[tuple[str, str, int]] = field(default_factory=list)
    """How processes ended that were not killed: name, what was done to them, exit code."""
    unfinished: set[str] = field(default_factory=set)
    """Processes that could not log the ends of their calls: killed, or crashed."""
    terminated: set[str] = field(default_factory=set)
    """Processes that were told to end with SIGTERM."""
    orphans: int = 0
    """Children of handlers that had not ended in the end."""


class FaultWindows:
    """Answers whether a fault explains what happened at some time."""

    def __init__(self, windows: Iterable[FaultWindow]) -> None:
        self._by_worker: dict[str, list[tuple[float, float]]] = {}
        for worker, begin, end, recovery_s in sorted(windows, key=lambda window: window.begin):
            merged = self._by_worker.setdefault(worker, [])
            until = end + recovery_s
            if merged and begin <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(until, merged[-1][1])
            else:
                merged.append((begin, until))
        self._ends = {worker: [until for _, until in merged] for worker, merged in self._by_worker.items()}

    def cover(self, begin: float, end: float, workers: Iterable[str] | None = None) -> bool:
        """Whether a fault of any of the workers, by default of all, was at work between two times."""
        for worker in self._by_worker if workers is None else workers:
            ends = self._ends.get(worker)
            if ends is None:
                continue
            at = bisect_left(ends, begin)
            if at < len(ends) and self._by_worker[worker][at][0] <= end:
                return True
        return False
