"""The arena of one worker: memory that it shares with its peers."""

from __future__ import annotations

import asyncio
from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from threading import Lock
from typing import Any, Final

from arpc.log import get_logger
from arpc.options import RpcOptions
from arpc.transport.release_queue import Lease, ReleaseQueue
from arpc.transport.shm.blocks import Block, BlockPool
from arpc.transport.shm.borrowing import Borrowings
from arpc.transport.shm.loans import Loans
from arpc.transport.shm.mapping import ArenaFile, is_supported
from arpc.transport.shm.processes import ProcessWatch
from arpc.transport.shm.threads import MemoryThreads
from arpc.wire.frames import ALIGNMENT
from arpc.wire.values.raw_memory import address_of, view_of

__all__ = ["Arena", "ArenaPlacement", "open_arena"]

logger = get_logger("arpc.transport")

_INLINE_BYTES: Final = 4 << 20
"""Copies up to this size run on the loop: to hand them to a thread and back would take as long."""
_COLD_FACTOR: Final = 6
"""How many times longer it takes to copy into fresh pages."""
_GROUP_BYTES: Final = 1 << 20
"""Small buffers of one message share blocks of up to this size. A block is in use while one of its buffers is."""
_GROUP_ALIGNMENT: Final = 64
_IDLE_S: Final = 10.0
"""Memory that was unused for this long goes back to the system."""


class ArenaPlacement:
    """The buffers of one message, each with its place in the arena. Holds their blocks until it is lent or dropped."""

    __slots__ = ("_copies", "_file", "blocks", "offsets", "sizes")

    def __init__(self, file: ArenaFile) -> None:
        self._file = file
        self._copies: list[tuple[memoryview, int, bool]] = []
        self.offsets: list[int] = []
        self.sizes: list[int] = []
        self.blocks: list[Block] = []

    def add(self, buffer: memoryview, block: Block, offset: int, *, is_there: bool) -> None:
        self.offsets.append(offset)
        self.sizes.append(buffer.nbytes)
        self.blocks.append(block)
        if not is_there:
            self._copies.append((buffer, offset, block.is_warm))

    @property
    def is_quick(self) -> bool:
        """Whether the copy is short enough to run on the loop instead of in a thread."""
        cost_bytes = sum(buffer.nbytes * (1 if is_warm else _COLD_FACTOR) for buffer, _, is_warm in self._copies)
        return cost_bytes <= _INLINE_BYTES

    def copy(self) -> None:
        """Copy the buffers into their blocks, in any thread. Raises `OSError` when the system has no memory."""
        copies, self._copies = self._copies, []
        for buffer, offset, is_warm in copies:
            self._file.copy(buffer, offset, is_warm=is_warm)


@dataclass(slots=True, eq=False)
class _Borrower:
    """A peer that has mapped the arena. ``link`` is the channel of its newest connection.

    Memory lent to a disconnected peer stays lent until the peer reconnects or its process ends: it may still read it.
    """

    name: str
    watch: ProcessWatch
    link: object = None
    loans: Loans[Block] = field(default_factory=Loans)


class Arena:
    """One worker's blocks, loans and copying threads. Belongs to the loop; any thread may call `allocate_shared`."""

    def __init__(self, *, capacity_bytes: int, from_bytes: int, window_bytes: int) -> None:
        """Raise `OSError` if the system has no such memory. None of the capacity is allocated yet."""
        self.loop = asyncio.get_running_loop()
        self.from_bytes = from_bytes
        """Messages with at least this many bytes of large tensors go through the arena."""
        self.window_bytes = window_bytes
        """The bytes that may wait in the arena for one peer to read them."""
        self.threads = MemoryThreads()
        self.borrowings = Borrowings(self.loop, self.threads.run)
        self.sends = 0
        self.sent_bytes = 0
        self.fallbacks = 0
        self._pool = BlockPool(capacity_bytes)
        self.file = ArenaFile(self._pool.addresses)
        self._borrowers: dict[int, _Borrower] = {}
        # Guards the blocks, which threads that make shared tensors use too. Finalizers (`Lease`) never take it.
        self._lock = Lock()
        self._owned: list[Block] = []
        """The blocks of shared tensors, sorted by offset."""
        # A tensor's lease refers to it, and so to this arena: the file stays mapped even after the worker was shut down
        self._ended: ReleaseQueue[Block] = ReleaseQueue(self.loop, self._free_owned)
        self._trimming: asyncio.TimerHandle | None = None
        self._is_closed = False

    # -- sending

    def wants(self, buffers: Sequence[memoryview], size_bytes: int) -> bool:
        """Whether a message is better sent through shared memory."""
        return not self._is_closed and (
            size_bytes >= self.from_bytes or (bool(self._owned) and any(map(self._is_in_it, buffers)))
        )

    def _is_in_it(self, buffer: memoryview) -> bool:
        return 0 <= address_of(buffer) - self.file.address < self.file.size_bytes

    def place(self, buffers: Sequence[memoryview]) -> ArenaPlacement | None:
        """Find a place for each buffer of a message; None if there is no room for all of them."""
        placement = ArenaPlacement(self.file)
        with self._lock:
            if self._place_all(placement, buffers):
                return placement
        self.drop(placement)
        self.fallbacks += 1
        if sum(buffer.nbytes for buffer in buffers) <= self._pool.capacity_bytes:
            self._trim(0.0)  # idle memory in blocks of other sizes may be what is missing
        return None

    def _place_all(self, placement: ArenaPlacement, buffers: Sequence[memoryview]) -> bool:
        small_bytes = sum(_aligned(buffer.nbytes) for buffer in buffers if buffer.nbytes < self.from_bytes)
        group: Block | None = None
        position = end = 0
        for buffer in buffers:
            size_bytes = buffer.nbytes
            found = self._find_owned(buffer) if self._owned else None
            if found is not None:
                block, offset = found
            elif size_bytes >= self.from_bytes:
                taken = self._pool.take(size_bytes)
                if taken is None:
                    return False
                block, offset = taken, taken.offset
            else:
                if group is None or position + size_bytes > end:
                    group_bytes = max(size_bytes, min(small_bytes, _GROUP_BYTES))
                    group = self._pool.take(group_bytes)
                    if group is None:
                        return False
                    position, end = group.offset, group.offset + group_bytes
                block, offset = group, position
                position += _aligned(size_bytes)
                small_bytes -= _aligned(size_bytes)
            block.holders += 1
            placement.add(buffer, block, offset, is_there=found is not None)
        return True

    def _find_owned(self, buffer: memoryview) -> tuple[Block, int] | None:
        """Return the block of the shared tensor that a buffer lies in, and the buffer's offset, or None."""
        offset = address_of(buffer) - self.file.address
        number = bisect_right(self._owned, offset, key=_offset_of) - 1
        # the peer would refuse an offset that is not aligned
        if number < 0 or offset % ALIGNMENT:
            return None
        block = self._owned[number]
        return (block, offset) if offset + buffer.nbytes <= block.offset + block.size_bytes else None

    def lend(self, borrower: int, placement: ArenaPlacement) -> None:
        """Record the loans of a placement; the caller sends the message to the borrower now."""
        loans = self._borrowers[borrower].loans
        for offset, size_bytes, block in zip(placement.offsets, placement.sizes, placement.blocks, strict=True):
            loans.begin(offset, size_bytes, block)  # the placement's hold on the block passes to the borrower
        self.sends += 1
        self.sent_bytes += sum(placement.sizes)

    def drop(self, placement: ArenaPlacement, *, is_broken: bool = False) -> None:
        """Release the blocks of a placement that is not sent. ``is_broken``: the system had no memory for it."""
        with self._lock:
            for block in placement.blocks if is_broken else ():
                if not block.is_warm:
                    self._pool.cool(block)
        self._let_go(placement.blocks)

    # -- peers

    def borrower_connected(self, borrower: int, name: str, pid: int, held: Sequence[int], link: object) -> None:
        """Record that a peer has mapped the arena and holds these earlier loans. Raises `KeyError` for unknown ones."""
        known = self._borrowers.get(borrower)
        if known is None:
            if held:
                raise KeyError(held[0])
            known = self._borrowers[borrower] = _Borrower(name, ProcessWatch(pid, self.loop))
        self._let_go(known.loans.reconcile(held))
        known.watch.stop_waiting()
        known.link = link

    def serves(self, borrower: int, link: object) -> bool:
        """Whether a connection is the newest to a borrower: only that one carries loans, and their ends."""
        known = self._borrowers.get(borrower)
        return known is not None and known.link is link

    def borrower_disconnected(self, borrower: int, link: object) -> None:
        """Handle the end of a peer's connection. Its loans stay until the peer reconnects, or its process ends."""
        known = self._borrowers.get(borrower)
        if known is None or known.link is not link:
            return  # a newer connection was made before the end of this one was noticed
        if known.loans:
            known.watch.call_at_end(lambda: self._borrower_died(borrower))
        else:
            self._forget_borrower(borrower)

    def _borrower_died(self, borrower: int) -> None:
        self._let_go(self._borrowers[borrower].loans.reconcile(()))
        self._forget_borrower(borrower)

    def _forget_borrower(self, borrower: int) -> None:
        self._borrowers.pop(borrower).watch.close()

    def has_loans(self, borrower: int) -> bool:
        known = self._borrowers.get(borrower)
        return known is not None and bool(known.loans)

    def take_back(self, borrower: int, offsets: Sequence[int]) -> None:
        """Take back the blocks of ended loans. Raises `KeyError` for a loan that was never made."""
        self._let_go(map(self._borrowers[borrower].loans.end, offsets))

    # -- shared tensors

    def allocate_shared(self, size_bytes: int) -> memoryview | None:
        """Return memory that can be sent without a copy; None if there is no room.

        It is freed when the view, and all views and tensors made from it, are gone.
        """
        with self._lock:
            block = None if self._is_closed else self._pool.take(size_bytes)
            if block is None:
                return None
            block.holders += 1
            insort(self._owned, block, key=_offset_of)
        view = view_of(Lease(self._ended, block), self.file.address + block.offset, size_bytes)
        try:
            if not block.is_warm:
                self.file.reserve(block.offset, size_bytes)
                block.is_warm = True
        except OSError as error:
            del view  # the error refers to this frame
            with self._lock:
                self._pool.cool(block)
            logger.warning("no shared memory for a tensor of %d bytes: %s", size_bytes, error)
            return None
        return view

    def _free_owned(self) -> None:
        ended = self._ended.take()
        with self._lock:
            for block in ended:
                self._owned.remove(block)
        self._let_go(ended)

    # -- memory

    def _let_go(self, blocks: Iterable[Block]) -> None:
        """Remove one holder from each of these blocks; a block without holders can be used again."""
        with self._lock:
            for block in blocks:
                block.holders -= 1
                if not block.holders:
                    self._pool.give_back(block, self.loop.time())
        self._trim_soon()

    def _trim_soon(self) -> None:
        """Schedule the return of idle memory to the system."""
        if self._trimming is None and self._pool.idle_bytes and not self._is_closed:
            self._trimming = self.loop.call_later(_IDLE_S, self._trim_idle)

    def _trim_idle(self) -> None:
        self._trimming = None
        self._trim(_IDLE_S)
        self._trim_soon()  # blocks that were used since then are trimmed later

    def _trim(self, idle_s: float) -> None:
        if self._is_closed:
            return
        with self._lock:
            blocks = self._pool.begin_trim(self.loop.time() - idle_s)
        if not blocks:
            return

        def punch() -> None:
            for block in blocks:
                self.file.free(block.offset, block.size_bytes)

        def punched(error: BaseException | None) -> None:
            if error is not None:
                logger.warning("shared memory cannot be given back to the system: %s", error)
            with self._lock:
                self._pool.end_trim(blocks)

        self.threads.run(punch, punched)

    # -- the end

    async def aclose(self) -> None:
        """Stop sharing memory. Memory that is still in use, here or at a peer, stays."""
        self._is_closed = True
        self._ended.close()
        if self._trimming is not None:
            self._trimming.cancel()
        await self.threads.aclose()
        for borrower in list(self._borrowers):
            self._forget_borrower(borrower)
        self.borrowings.close()
        self.file.close()

    def statistics(self) -> dict[str, Any]:
        """Return the counters of blocks, loans, sends and borrowed memory."""
        with self._lock:
            return {
                **self._pool.statistics(),
                "shared_blocks": len(self._owned),
                "lent_bytes": {known.name: known.loans.size_bytes for known in self._borrowers.values() if known.loans},
                "sends": self.sends,
                "sent_bytes": self.sent_bytes,
                "fallbacks": self.fallbacks,
                **self.borrowings.statistics(),
            }


def open_arena(options: RpcOptions) -> Arena | None:
    """Return an arena for a worker with these options; None if they turn it off, or the system does not support it."""
    if not options.shared_memory_bytes or not is_supported():
        return None
    try:
        return Arena(
            capacity_bytes=options.shared_memory_bytes,
            from_bytes=options.shared_memory_from_bytes,
            window_bytes=options.window_bytes,
        )
    except OSError as error:
        logger.warning("no memory can be shared with other processes (%s): large tensors go through sockets", error)
        return None


_offset_of: Final = attrgetter("offset")


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _GROUP_ALIGNMENT) * _GROUP_ALIGNMENT
