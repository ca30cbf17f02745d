"""At least once, made exactly once: numbers on messages that are sent again until they are answered. No I/O.

Every message to a peer gets the next number, and says which number is the oldest that may still be sent again. The
receiver remembers what it has seen above the first gap, and forgets the gaps that the sender has given up. Neither side
keeps more than what is on its way.
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
        # popping from the front of a plain dict again and again takes longer each time
        self._open: OrderedDict[int, None] = OrderedDict()

    def take(self) -> tuple[int, int]:
        """A number for a new message, and what `oldest` is then."""
        number = self._next
        self._next = number + 1
        self._open[number] = None
        return number, next(iter(self._open))

    def settle(self, number: int) -> None:
        """A message was answered, or given up: it will not be sent again."""
        self._open.pop(number, None)

    @property
    def is_settled(self) -> bool:
        """No message is under way."""
        return not self._open

    @property
    def oldest(self) -> int:
        """Nothing below this will ever be sent again."""
        return next(iter(self._open), self._next)


class Window:
    """The receiver's side, for one peer."""

    def __init__(self) -> None:
        self._floor = _FIRST
        self._above: set[int] = set()

    def admit(self, number: int, oldest: int) -> bool:
        """Whether a message comes for the first time. ``oldest`` is what its sender said."""
        if number == self._floor and oldest <= number and not self._above:
            self._floor += 1  # in order, as almost all of them are
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
        """How many numbers are remembered."""
        return len(self._above)


class NumbersByPeer(dict[str, Numbers]):
    """The sender's side for all peers, by name. Numbers go on when another worker comes under a name."""

    def __init__(self) -> None:
        self._first = _FIRST
        """Where the numbers for a peer begin: beyond all that were used for one that was forgotten and may return."""

    def __missing__(self, peer: str) -> Numbers:
        numbers = self[peer] = Numbers(self._first)
        return numbers

    def forget(self, peer: str) -> None:
        """Let go of the numbers for a peer that is gone, unless messages to it are still under way."""
        numbers = self.get(peer)
        if numbers is not None and numbers.is_settled:
            self._first = max(self._first, numbers.oldest)
            del self[peer]


class WindowsByPeer(dict[WorkerId, Window]):
    """The receiver's side for all peers, by their ids, of which each is given to one worker only."""

    def __missing__(self, peer: WorkerId) -> Window:
        window = self[peer] = Window()
        return window
