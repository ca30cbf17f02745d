"""What this worker has borrowed from the arenas of its peers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from arpc.errors import ProtocolError
from arpc.transport.release_queue import Lease, ReleaseQueue
from arpc.transport.shm.blocks import HEADER_BYTES
from arpc.transport.shm.loans import Loans
from arpc.transport.shm.mapping import MappedArena, Offer
from arpc.transport.shm.processes import ProcessWatch
from arpc.wire.frames import ALIGNMENT
from arpc.wire.values.bounds import check_range
from arpc.wire.values.raw_memory import view_of

__all__ = ["BorrowedArena", "Borrowings"]


class BorrowedArena:
    """The arena of one peer, as it is seen from here. It stays mapped for as long as anything in it is used."""

    def __init__(self, offer: Offer, loop: asyncio.AbstractEventLoop) -> None:
        """Raise `UnmappableError` if it cannot be used."""
        self.mapping: Final = MappedArena(offer)
        self.watch: Final = ProcessWatch(offer.pid, loop)
        """Of its owner."""
        self.on_ended: Callable[[], object] | None = None
        """Called on the loop when something was borrowed, or loans have ended."""
        self.loans: Final[Loans[None]] = Loans()
        """What is held and not given back, as the owner knows it."""
        self._ended: ReleaseQueue[int] = ReleaseQueue(loop, self._notify)

    def borrow(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """The memory that was lent. Raises `ProtocolError` if it cannot have been."""
        mapping = self.mapping
        self._ended.notify_soon()  # with the next turn, in which a small part of it may have ended already
        views: list[memoryview] = []
        for offset, size_bytes in zip(offsets, sizes, strict=True):
            if offset < HEADER_BYTES or offset % ALIGNMENT:
                raise ProtocolError(f"{size_bytes} bytes were lent at {offset}, where there cannot be any")
            check_range(offset, size_bytes, mapping.size_bytes)
            self.loans.begin(offset, size_bytes, None)
            views.append(view_of(Lease(self._ended, offset), mapping.address + offset, size_bytes))
        return views

    def _notify(self) -> None:
        if self.on_ended is not None:
            self.on_ended()

    def take_ended(self) -> list[int]:
        """The loans that have ended since this was asked last."""
        ended = self._ended.take()
        for offset in ended:
            self.loans.end(offset)
        return ended

    def held(self) -> list[int]:
        """An offset for each loan that has not ended. Of those that have, the owner need not be told any more."""
        self.take_ended()
        return self.loans.held()


class Borrowings:
    """All arenas that a worker has mapped, so that a peer that connects again finds what was lent before.

    ``run`` does something in a thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, run: Callable[[Callable[[], None]], None]) -> None:
        self._loop = loop
        self._run = run
        self._arenas: dict[int, BorrowedArena] = {}

    def map(self, lender: int, offer: Offer) -> BorrowedArena:
        """The arena of that peer. Raises `UnmappableError`."""
        arena = self._arenas.get(lender)
        if arena is None or arena.mapping.token != offer.token:
            arena = self._arenas[lender] = BorrowedArena(offer, self._loop)
        arena.watch.stop_waiting()
        return arena

    def release(self, lender: int, arena: BorrowedArena) -> None:
        """The connection is gone. The next one may bring the lender back, who then has to hear what is still held."""
        arena.on_ended = lambda: self._forget_unused(lender, arena)
        if not self._forget_unused(lender, arena):
            arena.watch.call_at_end(lambda: self._lender_died(lender, arena))

    def _forget_unused(self, lender: int, arena: BorrowedArena) -> bool:
        if arena.held():
            return False
        arena.on_ended = None
        arena.watch.close()
        if self._arenas.get(lender) is arena:
            del self._arenas[lender]
        return True

    def _lender_died(self, lender: int, arena: BorrowedArena) -> None:
        """The arena has no owner any more. What is held here stays, and the rest would stay with it: free that."""
        arena.watch.close()

        def shrink() -> None:
            if not self._forget_unused(lender, arena):
                ranges = arena.loans.ranges()
                self._run(lambda: arena.mapping.free_all_but(ranges))

        arena.on_ended = shrink
        shrink()

    def close(self) -> None:
        """This worker takes part no more. Memory that is still used stays."""
        for arena in self._arenas.values():
            arena.on_ended = None
            arena.watch.close()
        self._arenas.clear()

    def statistics(self) -> dict[str, int]:
        return {
            "mapped_arenas": len(self._arenas),
            "borrowed_bytes": sum(arena.loans.size_bytes for arena in self._arenas.values()),
        }
