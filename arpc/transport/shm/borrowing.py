"""What this worker has borrowed from the arenas of its peers."""

from __future__ import annotations

import asyncio
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from arpc.errors import ProtocolError
from arpc.transport.shm.blocks import HEADER_BYTES
from arpc.transport.shm.mapping import MappedArena, Offer
from arpc.wire.frames import ALIGNMENT
from arpc.wire.memory import view_of

__all__ = ["BorrowedArena", "Borrowings"]

_getpid = os.getpid


class _Lease:
    """Owns the memory of one buffer. Its end is the end of the loan, in whatever thread that happens."""

    __slots__ = ("_arena", "_offset")

    def __init__(self, arena: BorrowedArena, offset: int) -> None:
        self._arena = arena
        self._offset = offset

    def __del__(self) -> None:
        self._arena.lease_ended(self._offset)


class BorrowedArena:
    """The arena of one peer, as it is seen from here. It stays mapped for as long as anything in it is used."""

    def __init__(self, offer: Offer, loop: asyncio.AbstractEventLoop) -> None:
        """Raise `UnmappableError` if it cannot be used."""
        self.mapping: Final = MappedArena(offer)
        self.loans: Counter[int] = Counter()
        """By offset, what is held and not given back, as the owner knows it."""
        self.on_ended: Callable[[], None] | None = None
        """Called on the loop when loans have ended: whoever can tell the owner."""
        self._ended: deque[int] = deque()
        self._is_scheduled = False
        self._loop = loop
        self._pid = os.getpid()

    def borrow(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """The memory that was lent. Raises `ProtocolError` if it cannot have been."""
        mapping = self.mapping
        views: list[memoryview] = []
        for offset, size_bytes in zip(offsets, sizes, strict=True):
            if offset < HEADER_BYTES or offset + size_bytes > mapping.size_bytes or offset % ALIGNMENT:
                raise ProtocolError(f"{size_bytes} bytes were lent at {offset}, where there cannot be any")
            self.loans[offset] += 1
            views.append(view_of(_Lease(self, offset), mapping.address + offset, size_bytes))
        return views

    def lease_ended(self, offset: int) -> None:
        # In any thread, within any other step, in a garbage collection: nothing is done here but to take note
        self._ended.append(offset)
        if not self._is_scheduled and self.on_ended is not None and self._pid == _getpid():
            self._is_scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._tell)
            except RuntimeError:
                pass  # the loop is closed, and nobody is left to tell

    def _tell(self) -> None:
        self._is_scheduled = False
        if self.on_ended is not None and self._ended:
            self.on_ended()

    @property
    def has_ended_loans(self) -> bool:
        return bool(self._ended)

    def take_ended(self) -> list[int]:
        """The loans that have ended and of which nobody has been told."""
        ended: list[int] = []
        while self._ended:
            ended.append(self._ended.popleft())
        self._forget(ended)
        return ended

    def _forget(self, ended: Iterable[int]) -> None:
        loans = self.loans
        for offset in ended:
            loans[offset] -= 1
            if not loans[offset]:
                del loans[offset]

    def held(self) -> list[int]:
        """An offset for each loan that has not ended."""
        self.take_ended()
        return list(self.loans.elements())


class Borrowings:
    """All arenas that a worker has mapped, so that a peer that connects again finds what was lent before."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arenas: dict[int, BorrowedArena] = {}

    def map(self, lender: int, offer: Offer) -> BorrowedArena:
        """The arena of that peer. Raises `UnmappableError`."""
        arena = self._arenas.get(lender)
        if arena is None or arena.mapping.token != offer.token:
            arena = self._arenas[lender] = BorrowedArena(offer, self._loop)
        return arena

    def release(self, lender: int, arena: BorrowedArena) -> None:
        """The connection is gone. What is still held may have to be told on the next one; else there is no use in it."""
        arena.on_ended = lambda: self._forget_if_unused(lender, arena)
        self._forget_if_unused(lender, arena)

    def _forget_if_unused(self, lender: int, arena: BorrowedArena) -> None:
        if not arena.held() and self._arenas.get(lender) is arena:
            arena.on_ended = None
            del self._arenas[lender]

    def clear(self) -> None:
        """This worker takes part no more. Memory that is still used stays."""
        self._arenas.clear()

    def held_bytes(self) -> dict[int, int]:
        """How many loans each lender has here."""
        return {lender: sum(arena.loans.values()) for lender, arena in self._arenas.items()}
