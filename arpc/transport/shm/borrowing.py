"""Memory that this worker has borrowed from the arenas of its peers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from arpc.errors import ProtocolError
from arpc.transport.release_queue import Lease, ReleaseQueue
from arpc.transport.shm.blocks import HEADER_BYTES
from arpc.transport.shm.loans import Loans
from arpc.transport.shm.mapping import ArenaOffer, MappedArena
from arpc.transport.shm.processes import ProcessWatch
from arpc.wire.frames import ALIGNMENT
from arpc.wire.values.bounds import check_range
from arpc.wire.values.raw_memory import view_of

__all__ = ["BorrowedArena", "Borrowings"]


class BorrowedArena:
    """The arena of one peer, mapped into this process. It stays mapped for as long as anything in it is used."""

    def __init__(self, offer: ArenaOffer, loop: asyncio.AbstractEventLoop) -> None:
        """Raise `UnmappableError` if it cannot be used."""
        self.mapping: Final = MappedArena(offer)
        self.watch: Final = ProcessWatch(offer.pid, loop)
        """The watch over the owner's process."""
        self.on_ended: Callable[[], object] | None = None
        """The callback, on the loop, for when memory was borrowed or loans have ended."""
        self.loans: Final[Loans[None]] = Loans()
        """The loans that are held and not given back, as the owner records them."""
        self._ended: ReleaseQueue[int] = ReleaseQueue(loop, self._notify)

    def borrow(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """Return views of the memory that was lent. Raises `ProtocolError` for memory that cannot have been lent."""
        mapping = self.mapping
        self._ended.notify_soon()  # in the next loop turn, by which loans of small parts may have ended already
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
        """Return the offsets of the loans that have ended since the last call."""
        ended = self._ended.take()
        for offset in ended:
            self.loans.end(offset)
        return ended

    def held(self) -> list[int]:
        """Return the offset of each loan that has not ended. The owner needs no report of the ended ones any more."""
        self.take_ended()
        return self.loans.held()


class Borrowings:
    """All arenas that a worker has mapped, kept so that a peer that reconnects finds its earlier loans.

    ``run`` runs a function in a thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, run: Callable[[Callable[[], None]], None]) -> None:
        self._loop = loop
        self._run = run
        self._arenas: dict[int, BorrowedArena] = {}

    def map(self, lender: int, offer: ArenaOffer) -> BorrowedArena:
        """Return the mapped arena of a peer. Raises `UnmappableError`."""
        arena = self._arenas.get(lender)
        if arena is None or arena.mapping.token != offer.token:
            arena = self._arenas[lender] = BorrowedArena(offer, self._loop)
        arena.watch.stop_waiting()
        return arena

    def release(self, lender: int, arena: BorrowedArena) -> None:
        """Detach an arena from its ended connection. A lender that reconnects has to learn what is still held."""
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
        """Free what is not held here of an arena whose owner died: held memory keeps the whole arena mapped."""
        arena.watch.close()

        def shrink() -> None:
            if not self._forget_unused(lender, arena):
                ranges = arena.loans.ranges()
                self._run(lambda: arena.mapping.free_all_but(ranges))

        arena.on_ended = shrink
        shrink()

    def close(self) -> None:
        """Stop borrowing. Memory that is still in use stays."""
        for arena in self._arenas.values():
            arena.on_ended = None
            arena.watch.close()
        self._arenas.clear()

    def statistics(self) -> dict[str, int]:
        return {
            "mapped_arenas": len(self._arenas),
            "borrowed_bytes": sum(arena.loans.size_bytes for arena in self._arenas.values()),
        }
