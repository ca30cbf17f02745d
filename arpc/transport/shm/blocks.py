"""Which parts of an arena are in use, which are free, and which of those have memory behind them. Pure bookkeeping.

Addresses are plenty, since the file is sparse; memory is what counts. So a block keeps its place and its size, a power
of two, for ever, and only the pages that were written to take memory. Nothing can fragment: whatever of a block is not
used costs nothing but addresses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

__all__ = ["HEADER_BYTES", "PAGE_BYTES", "Block", "BlockPool"]

PAGE_BYTES: Final = 4096
HEADER_BYTES: Final = 1 << 16
"""The beginning of an arena, which is not given out: the token lies there."""
_SMALLEST_BITS: Final = 16
_ADDRESSES_PER_BYTE: Final = 32
"""How many addresses there are for each byte of capacity: a size may have to find its place beside all others."""


class Block:
    """A piece of an arena."""

    __slots__ = ("free_since", "holders", "is_warm", "offset", "resident_bytes", "size_bytes")

    def __init__(self, offset: int, size_bytes: int) -> None:
        self.offset = offset
        self.size_bytes = size_bytes
        self.resident_bytes = 0
        """How much of it, from its beginning, has memory behind it."""
        self.is_warm = False
        """All that was asked for had memory behind it before anything was copied there."""
        self.holders = 0
        """How many need it: this worker, while it fills it or has a tensor there, and one for each loan of it."""
        self.free_since = 0.0

    def __repr__(self) -> str:
        return f"<Block at {self.offset:#x}, {self.resident_bytes} of {self.size_bytes} bytes, {self.holders} holders>"


class BlockPool:
    """Gives out blocks, and takes them back. At most ``capacity_bytes`` have memory behind them at any time."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.resident_bytes = 0
        """Memory behind all blocks, used or not."""
        self.used_bytes = 0
        """Memory behind those that are out."""
        self.used_blocks = 0
        # By size. The end of a list was used last, and may still be in the caches
        self._free: dict[int, deque[Block]] = {}
        self._end = HEADER_BYTES

    @property
    def addresses(self) -> int:
        """How large the file is, memory or not."""
        return HEADER_BYTES + _ADDRESSES_PER_BYTE * max(self.capacity_bytes, 1 << _SMALLEST_BITS)

    @property
    def idle_bytes(self) -> int:
        """Memory behind blocks that nobody uses."""
        return self.resident_bytes - self.used_bytes

    def take(self, size_bytes: int) -> Block | None:
        """A block for so many bytes; None if there is no memory for it now."""
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
        """A block that is out turned out to have no memory behind it, or not all of it."""
        self.resident_bytes -= block.resident_bytes
        self.used_bytes -= block.resident_bytes
        block.resident_bytes = 0

    def give_back(self, block: Block, now: float) -> None:
        """Nobody has it any more."""
        block.free_since = now
        self.used_bytes -= block.resident_bytes
        self.used_blocks -= 1
        self._free.setdefault(block.size_bytes, deque()).append(block)

    # -- giving memory back to the system

    def begin_trim(self, idle_since: float) -> list[Block]:
        """Take out the free blocks not used since then. Their memory is to be freed, then `end_trim` called."""
        trimmed: list[Block] = []
        for size_bytes, free in self._free.items():
            kept: deque[Block] = deque()
            for block in free:
                (trimmed if block.resident_bytes and block.free_since <= idle_since else kept).append(block)
            self._free[size_bytes] = kept
        return trimmed

    def end_trim(self, blocks: Sequence[Block]) -> None:
        """These have no memory any more."""
        for block in blocks:
            self.resident_bytes -= block.resident_bytes
            block.resident_bytes = 0
            # to the cold end: a warm one is better
            self._free.setdefault(block.size_bytes, deque()).appendleft(block)

    def statistics(self) -> dict[str, int]:
        return {
            "capacity_bytes": self.capacity_bytes,
            "resident_bytes": self.resident_bytes,
            "used_bytes": self.used_bytes,
            "used_blocks": self.used_blocks,
        }
