"""The used and the free blocks of an arena, and the memory behind them. Pure bookkeeping.

Addresses are plentiful, since the file is sparse; memory is what counts. So a block keeps its offset and its size, a
power of two, for ever, and only the pages that were written to take memory. There is no fragmentation: the unused part
of a block costs nothing but addresses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

__all__ = ["HEADER_BYTES", "PAGE_BYTES", "Block", "BlockPool"]

PAGE_BYTES: Final = 4096
HEADER_BYTES: Final = 1 << 16
"""The size of the beginning of an arena, which holds the token and is never given out."""
_SMALLEST_BITS: Final = 16
_ADDRESSES_PER_BYTE: Final = 32
"""The addresses for each byte of capacity: blocks of one size may have to find room beside those of all others."""


class Block:
    """A range of an arena."""

    __slots__ = ("free_since", "holders", "is_warm", "offset", "resident_bytes", "size_bytes")

    def __init__(self, offset: int, size_bytes: int) -> None:
        self.offset = offset
        self.size_bytes = size_bytes
        self.resident_bytes = 0
        """The bytes, from the beginning of the block, that have memory behind them."""
        self.is_warm = False
        """Whether all requested bytes had memory behind them before anything was copied there."""
        self.holders = 0
        """The number of holders: this worker, while it fills the block or has a tensor there, and one for each loan."""
        self.free_since = 0.0

    def __repr__(self) -> str:
        return f"<Block at {self.offset:#x}, {self.resident_bytes} of {self.size_bytes} bytes, {self.holders} holders>"


class BlockPool:
    """Gives out blocks, and takes them back. At most ``capacity_bytes`` have memory behind them at any time."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.resident_bytes = 0
        """The bytes of memory behind all blocks, used or free."""
        self.used_bytes = 0
        """The bytes of memory behind the blocks in use."""
        self.used_blocks = 0
        # By size. The block at the end of a list was used last, and may still be in the CPU's caches
        self._free: dict[int, deque[Block]] = {}
        self._end = HEADER_BYTES

    @property
    def addresses(self) -> int:
        """The size of the file in bytes, with or without memory behind them."""
        return HEADER_BYTES + _ADDRESSES_PER_BYTE * max(self.capacity_bytes, 1 << _SMALLEST_BITS)

    @property
    def idle_bytes(self) -> int:
        """The bytes of memory behind free blocks."""
        return self.resident_bytes - self.used_bytes

    def take(self, size_bytes: int) -> Block | None:
        """Return a block for this many bytes; None if there is no memory for it now."""
        block_bytes = 1 << max(_SMALLEST_BITS, (size_bytes - 1).bit_length())
        needed = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        free = self._free.get(block_bytes)
        resident = free[-1].resident_bytes if free else 0
        growth = max(0, needed - resident)
        if self.resident_bytes + growth > self.capacity_bytes:
            return None
        if free:
            block = free.pop()
        elif self._end + block_bytes <= self.addresses:
            block = Block(self._end, block_bytes)
            self._end += block_bytes
        else:
            return None
        block.is_warm = not growth
        block.resident_bytes += growth
        self.resident_bytes += growth
        self.used_bytes += block.resident_bytes
        self.used_blocks += 1
        return block

    def cool(self, block: Block) -> None:
        """Record that a block in use has no memory behind it, or not behind all of it."""
        self.resident_bytes -= block.resident_bytes
        self.used_bytes -= block.resident_bytes
        block.resident_bytes = 0

    def give_back(self, block: Block, now: float) -> None:
        """Take back a block that has no holders any more."""
        block.free_since = now
        self.used_bytes -= block.resident_bytes
        self.used_blocks -= 1
        self._free.setdefault(block.size_bytes, deque()).append(block)

    # -- giving memory back to the system

    def begin_trim(self, idle_since: float) -> list[Block]:
        """Take out the free blocks not used since then. The caller frees their memory, then calls `end_trim`."""
        trimmed: list[Block] = []
        for size_bytes, free in self._free.items():
            kept: deque[Block] = deque()
            for block in free:
                (trimmed if block.resident_bytes and block.free_since <= idle_since else kept).append(block)
            self._free[size_bytes] = kept
        return trimmed

    def end_trim(self, blocks: Sequence[Block]) -> None:
        """Put back blocks whose memory was freed."""
        for block in blocks:
            self.resident_bytes -= block.resident_bytes
            block.resident_bytes = 0
            # to the cold end: a warm block is better
            self._free.setdefault(block.size_bytes, deque()).appendleft(block)

    def statistics(self) -> dict[str, int]:
        return {
            "capacity_bytes": self.capacity_bytes,
            "resident_bytes": self.resident_bytes,
            "used_bytes": self.used_bytes,
            "used_blocks": self.used_blocks,
        }
