"""Exactly-once handling of messages that are retried until they are acknowledged, by means of numbers. No I/O.

Every message to a peer gets the next number, and carries the oldest number that may still be sent again. The receiver
remembers the numbers it has seen above the first gap, and forgets the gaps that the sender has given up. Neither side
keeps more than the numbers in flight.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from arpc.ids import WorkerId

__all__ = ["Numbers", "NumbersByPeer", "Window", "WindowsByPeer"]

_FIRST: Final = 1


class Numbers:
    """The sender's side, for one peer."""

    def __init__(self, first: int = _FIRST) -> None:
        self._next = first
        # repeated pops from the front of a plain dict take longer each time
        self._open: OrderedDict[int, None] = OrderedDict()

    def take(self) -> tuple[int, int]:
        """Return a number for a new message, and the value of `oldest` that goes with it."""
        number = self._next
        self._next = number + 1
        self._open[number] = None
        return number, next(iter(self._open))

    def settle(self, number: int) -> None:
        """Record that a message was answered or given up: it will not be sent again."""
        self._open.pop(number, None)

    @property
    def is_settled(self) -> bool:
        """Whether no message is in flight."""
        return not self._open

    @property
    def oldest(self) -> int:
        """The oldest number that may still be sent again; if there is none, the next number."""
        return next(iter(self._open), self._next)


class Window:
    """The receiver's side, for one peer."""

    def __init__(self) -> None:
        self._floor = _FIRST
        self._above: set[int] = set()

    def admit(self, number: int, oldest: int) -> bool:
        """Whether a message arrives for the first time; also records it. ``oldest`` is from the sender's `Numbers`."""
        if number == self._floor and oldest <= number and not self._above:
            self._floor += 1  # in order, as almost all messages are
            return True
        if oldest > self._floor:
            self._floor = oldest
            self._above = {seen for seen in self._above if seen >= oldest}
        if number < self._floor or number in self._above:
            self._advance()
            return False
        self._above.add(number)
        self._advance()
        return True

    def _advance(self) -> None:
        while self._floor in self._above:
            self._above.discard(self._floor)
            self._floor += 1

    def __len__(self) -> int:
        """Return the count of remembered numbers."""
        return len(self._above)


class NumbersByPeer(dict[str, Numbers]):
    """The sender's side for all peers, by name. A worker that replaces another under its name continues its numbers."""

    def __init__(self) -> None:
        self._first = _FIRST
        """The first number for a new peer: beyond all numbers used for forgotten peers, since those may return."""

    def __missing__(self, peer: str) -> Numbers:
        numbers = self[peer] = Numbers(self._first)
        return numbers

    def forget(self, peer: str) -> None:
        """Forget the numbers for a peer that is gone, unless messages to it are still in flight."""
        numbers = self.get(peer)
        if numbers is not None and numbers.is_settled:
            self._first = max(self._first, numbers.oldest)
            del self[peer]


class WindowsByPeer(dict[WorkerId, Window]):
    """The receiver's side for all peers, by worker id. No two workers ever have the same id."""

    def __missing__(self, peer: WorkerId) -> Window:
        window = self[peer] = Window()
        return window
