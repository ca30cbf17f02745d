"""What `_all_gather` keeps in the process of its leader and of those who follow."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

__all__ = ["Gathering", "Gatherings"]


class Gathering:
    """One round: what the workers brought, and the signal that all of it is there."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.is_complete = threading.Event()


class Gatherings:
    """The rounds of this process. Rounds of the same workers follow one another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._rounds: dict[str, Gathering] = {}

    def next_id(self, names: Iterable[str]) -> str:
        """An id that all of these workers find for the same round."""
        joined = "".join(sorted(names))
        with self._lock:
            count = self._counts.get(joined, 0)
            self._counts[joined] = count + 1
        return f"{joined}{count}"

    def get(self, round_id: str) -> Gathering:
        with self._lock:
            return self._rounds.setdefault(round_id, Gathering())

    def take(self, round_id: str) -> Gathering:
        with self._lock:
            return self._rounds.pop(round_id, None) or Gathering()

    def add(self, round_id: str, name: str, brought: Any, expected: set[str]) -> None:
        """A worker has come."""
        with self._lock:
            gathering = self._rounds.setdefault(round_id, Gathering())
            if name in gathering.objects:
                raise AssertionError(f"{name} reported intent sequence id {round_id} twice. ")
            gathering.objects[name] = brought
            if gathering.objects.keys() == expected:
                gathering.is_complete.set()

    def clear(self) -> None:
        """The next group counts its rounds from 0 again."""
        with self._lock:
            self._counts.clear()
            self._rounds.clear()
