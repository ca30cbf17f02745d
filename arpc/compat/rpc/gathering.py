"""The state of `_all_gather`, on its leader and on its followers."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

__all__ = ["AllGatherStates", "Gatherings"]


class AllGatherStates:
    """One round of `_all_gather`: the objects of the workers by name, and an event for when all are there.

    Programs that gather by themselves use this class, so its attributes have torch's names.
    """

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()


class Gatherings:
    """The rounds of this process. Rounds of the same workers follow one another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._rounds: dict[str, AllGatherStates] = {}

    def next_id(self, names: Iterable[str]) -> str:
        """Return an id that all of these workers compute for the same round."""
        joined = "".join(sorted(names))
        with self._lock:
            count = self._counts.get(joined, 0)
            self._counts[joined] = count + 1
        return f"{joined}{count}"

    def get(self, round_id: str) -> AllGatherStates:
        with self._lock:
            return self._rounds.setdefault(round_id, AllGatherStates())

    def take(self, round_id: str) -> AllGatherStates:
        with self._lock:
            return self._rounds.pop(round_id, None) or AllGatherStates()

    def add(self, round_id: str, name: str, brought: Any, expected: set[str]) -> None:
        """Add the object of a worker. The event is set once all expected workers have added theirs."""
        with self._lock:
            gathering = self._rounds.setdefault(round_id, AllGatherStates())
            if name in gathering.gathered_objects:
                raise AssertionError(f"{name} reported intent sequence id {round_id} twice. ")
            gathering.gathered_objects[name] = brought
            if gathering.gathered_objects.keys() == expected:
                gathering.proceed_signal.set()

    def clear(self) -> None:
        """Forget all rounds: the next group counts its rounds from 0 again."""
        with self._lock:
            self._counts.clear()
            self._rounds.clear()
