"""The findings of the runner: the times of faults, deaths, state that was left, memory."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from scripts.soak.workers import OPTIONS

__all__ = ["RECOVERY_S", "FaultWindow", "FaultWindows", "Findings"]

RECOVERY_S: Final = OPTIONS.heartbeat_timeout + OPTIONS.connect_timeout + OPTIONS.rref_grace + 4.0
"""Seconds after a fault during which errors may be its consequence."""


class FaultWindow(NamedTuple):
    """The time of a fault of a worker, ``begin`` to ``end``; its consequences may last ``recovery_s`` longer."""

    worker: str
    begin: float
    end: float
    recovery_s: float = RECOVERY_S


@dataclass
class Findings:
    """The findings of a soak, besides the event logs."""

    faults: Counter[str] = field(default_factory=Counter)
    windows: list[FaultWindow] = field(default_factory=list)
    killed_at: dict[str, float] = field(default_factory=dict)
    """The times at which processes (``name.start``) received a SIGKILL."""
    crashes: list[tuple[str, int | None]] = field(default_factory=list)
    """Processes that ended without a fault, with their exit codes."""
    failures: list[str] = field(default_factory=list)
    """The steps that the runner could not do."""
    left: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The state that workers still had in the end, by name."""
    tables: dict[str, dict[str, int]] = field(default_factory=dict)
    """Sizes of large tables in the end, by worker."""
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """Resident bytes of each process over time."""
    codes: list[tuple[str, str, int]] = field(default_factory=list)
    """The ends of processes that were not killed: worker name, ``leave`` or ``SIGTERM``, exit code."""
    unfinished: set[str] = field(default_factory=set)
    """Processes that could not log the ends of their calls: killed, or crashed."""
    terminated: set[str] = field(default_factory=set)
    """Processes that received a SIGTERM."""
    orphans: int = 0
    """The number of children of handlers that had not ended in the end."""


class FaultWindows:
    """Checks whether a fault explains an event at some time."""

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
        """Whether a fault of any of the workers, by default of all, or its consequences, lasted between two times."""
        for worker in self._by_worker if workers is None else workers:
            ends = self._ends.get(worker)
            if ends is None:
                continue
            at = bisect_left(ends, begin)
            if at < len(ends) and self._by_worker[worker][at][0] <= end:
                return True
        return False
