"""Blocks of an arena: no two overlap, and no more memory is used than may be."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from arpc.transport.shm.blocks import HEADER_BYTES, PAGE_BYTES, Block, BlockPool

KIB = 1 << 10
MIB = 1 << 20


def test_a_block_is_used_again_and_warm():
    pool = BlockPool(16 * MIB)
    block = pool.take(MIB)
    assert block is not None
    assert not block.is_warm
    pool.give_back(block, now=1.0)
    again = pool.take(MIB - 5)
    assert again is block
    assert again.is_warm
    assert pool.statistics()["resident_bytes"] == MIB


def test_the_last_one_used_is_the_first_one_used_again():
    pool = BlockPool(16 * MIB)
    blocks = [pool.take(MIB) for _ in range(3)]
    for now, block in enumerate(blocks):
        pool.give_back(block, now)
    assert pool.take(MIB) is blocks[-1]


def test_only_pages_that_are_needed_count():
    pool = BlockPool(16 * MIB)
    block = pool.take(MIB + 1)
    assert block.size_bytes == 2 * MIB
    assert pool.resident_bytes == MIB + PAGE_BYTES
    pool.give_back(block, now=0.0)
    grown = pool.take(2 * MIB)
    assert grown is block
    assert not grown.is_warm, "half of it has no memory yet"
    assert pool.resident_bytes == 2 * MIB


def test_a_full_pool_has_nothing_until_something_comes_back():
    pool = BlockPool(MIB)
    block = pool.take(MIB)
    assert pool.take(1) is None
    assert pool.take(2 * MIB) is None
    pool.give_back(block, now=0.0)
    assert pool.take(1) is None, "what is idle is of another size"
    pool.end_trim(pool.begin_trim(idle_since=0.0))
    assert pool.take(1) is not None


def test_what_was_used_lately_is_not_trimmed():
    pool = BlockPool(16 * MIB)
    old, new = pool.take(MIB), pool.take(MIB)
    pool.give_back(old, now=1.0)
    pool.give_back(new, now=2.0)
    assert pool.begin_trim(idle_since=1.5) == [old]
    assert pool.idle_bytes == 2 * MIB, "its memory is there until the trim has ended"
    assert pool.take(MIB) is new
    assert pool.take(MIB) not in {old, new}, "one that is being trimmed is not given out"
    pool.end_trim([old])
    assert pool.resident_bytes == 2 * MIB
    assert pool.take(MIB) is old
    assert not old.is_warm


def test_memory_that_was_not_to_be_had_does_not_count():
    pool = BlockPool(16 * MIB)
    block = pool.take(MIB)
    pool.cool(block)
    pool.give_back(block, now=0.0)
    assert (pool.resident_bytes, pool.used_bytes, pool.used_blocks) == (0, 0, 0)
    assert not pool.take(MIB).is_warm


def test_a_pool_of_next_to_nothing():
    pool = BlockPool(1)
    assert pool.take(1) is None
    assert pool.take(100) is None


class PoolMachine(RuleBasedStateMachine):
    """Take, give back and trim in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8 * MIB)
        self.out: list[Block] = []
        self.trimming: list[Block] = []
        self.now = 0.0

    @rule(size_bytes=st.integers(1, 3 * MIB) | st.sampled_from([64 * KIB, 64 * KIB + 1, MIB, 8 * MIB, 8 * MIB + 1]))
    def take(self, size_bytes: int) -> None:
        resident = self.pool.resident_bytes
        block = self.pool.take(size_bytes)
        if block is None:
            assert resident + size_bytes + PAGE_BYTES > self.pool.capacity_bytes or self.pool.idle_bytes
            assert self.pool.resident_bytes == resident
        else:
            assert block not in self.out
            assert block not in self.trimming
            assert block.size_bytes >= block.resident_bytes >= size_bytes
            assert block.is_warm == (self.pool.resident_bytes == resident)
            self.out.append(block)

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.out:
            block = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
            self.now += 1
            self.pool.give_back(block, self.now)

    @rule(age=st.integers(0, 5))
    def begin_trim(self, age: int) -> None:
        blocks = self.pool.begin_trim(self.now - age)
        assert all(block.free_since <= self.now - age for block in blocks)
        self.trimming += blocks

    @rule()
    def end_trim(self) -> None:
        self.pool.end_trim(self.trimming)
        assert not any(block.resident_bytes for block in self.trimming)
        self.trimming = []

    @invariant()
    def no_two_overlap(self) -> None:
        ranges = sorted((block.offset, block.offset + block.size_bytes) for block in self.out)
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
        assert all(start >= HEADER_BYTES and end <= self.pool.addresses for start, end in ranges)

    @invariant()
    def the_books_are_right(self) -> None:
        assert self.pool.used_blocks == len(self.out)
        assert self.pool.used_bytes == sum(block.resident_bytes for block in self.out)
        assert self.pool.used_bytes <= self.pool.resident_bytes <= self.pool.capacity_bytes


TestPool = PoolMachine.TestCase
