"""An arena's memory: when it goes back to the system, when a borrower is written off, and what a lender leaves."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading

import msgspec
import pytest

from arpc.options import RpcOptions
from arpc.testing.endpoints import turns_until
from arpc.transport.shm import Arena, open_arena
from arpc.transport.shm import arena as arena_module
from arpc.transport.shm.borrowing import Borrowings
from arpc.transport.shm.mapping import ArenaFile, ArenaOffer, is_supported
from tests.descriptors import open_descriptors
from tests.transport.shm.sharing import KIB, MIB, sharing

pytestmark = pytest.mark.skipif(not is_supported(), reason="only Linux has files in memory without a name")

LINK = object()
SLEEPER = (sys.executable, "-c", "import time; time.sleep(60)")


@pytest.fixture
async def arena():
    made = Arena(capacity_bytes=64 * MIB, from_bytes=64 * KIB, window_bytes=64 * MIB)
    yield made
    await made.aclose()


def place(arena: Arena, size_bytes: int):
    placement = arena.place([memoryview(b"x" * size_bytes)])
    assert placement is not None
    placement.copy()
    return placement


def memory_of(file: ArenaFile) -> int:
    return os.fstat(file.fd).st_blocks * 512


async def test_idle_memory_goes_back_after_a_while(arena, monkeypatch):
    monkeypatch.setattr(arena_module, "_IDLE_S", 0.01)
    kept = place(arena, MIB)
    arena.drop(place(arena, MIB))
    arena.drop(place(arena, 8 * MIB))
    await turns_until(lambda: arena.statistics()["resident_bytes"] == MIB)
    assert memory_of(arena.file) <= MIB + 4 * KIB
    await turns_until(lambda: arena._trimming is None)  # nothing is left to look after
    arena.drop(kept)
    await turns_until(lambda: arena.statistics()["resident_bytes"] == 0)


async def test_no_option_no_arena():
    assert open_arena(RpcOptions(shared_memory_bytes=0)) is None


async def test_no_system_no_arena(monkeypatch, caplog):
    monkeypatch.setattr(arena_module, "is_supported", lambda: False)
    assert open_arena(RpcOptions()) is None

    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(arena_module, "is_supported", lambda: True)
    monkeypatch.setattr(arena_module, "ArenaFile", refuse)
    assert open_arena(RpcOptions()) is None
    assert "large tensors go through sockets" in caplog.text


async def test_a_borrower_that_is_gone_keeps_its_loans_until_its_process_ends(arena):
    process = subprocess.Popen(SLEEPER)
    try:
        arena.borrower_connected(7, "seven", process.pid, [], LINK)
        arena.lend(7, place(arena, MIB))
        arena.borrower_disconnected(7, LINK)
        await asyncio.sleep(0)
        assert arena.statistics()["lent_bytes"] == {"seven": MIB}
        process.kill()
        await turns_until(lambda: not arena.has_loans(7))
        assert arena.statistics()["used_blocks"] == 0
    finally:
        process.kill()
        process.wait()


async def test_a_borrower_that_comes_back_is_not_written_off(arena):
    process = subprocess.Popen(SLEEPER)
    try:
        arena.borrower_connected(7, "seven", process.pid, [], LINK)
        placement = place(arena, MIB)
        arena.lend(7, placement)
        arena.borrower_disconnected(7, LINK)
        arena.borrower_connected(7, "seven", process.pid, placement.offsets, LINK)
    finally:
        process.kill()
        process.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    assert arena.has_loans(7), "its connection will tell"
    arena.take_back(7, placement.offsets)
    assert arena.statistics()["used_blocks"] == 0


async def test_a_borrower_without_loans_leaves_nothing(arena):
    descriptors = open_descriptors()
    arena.borrower_connected(7, "seven", os.getpid(), [], LINK)
    arena.borrower_disconnected(7, LINK)
    assert open_descriptors() == descriptors


async def test_shared_memory_lives_until_the_last_has_let_go():
    async with sharing() as both:
        memory = both.near_arena.allocate_shared(MIB)
        memory[:] = b"x" * MIB
        (first,) = await both.send(memory)
        (again,) = await both.send(memory[16 : 64 * KIB])
        assert both.near_arena.statistics()["used_blocks"] == 1
        first[16:20] = b"seen"
        assert bytes(memory[16:20]) == bytes(again[:4]) == b"seen"
        del memory
        gc.collect()
        await turns_until(lambda: both.near_arena.statistics()["shared_blocks"] == 0)
        assert bytes(again[:4]) == b"seen"
        del first
        await both.freed(used_blocks=1)
        del again
        await both.freed()


async def test_shared_memory_that_is_small_or_not_aligned():
    async with sharing() as both:
        memory = both.near_arena.allocate_shared(MIB)
        (small,) = await both.send(memory[:32])
        small[:1] = b"a"
        assert bytes(memory[:1]) == b"a", "it is shared although it is small"
        (unaligned,) = await both.send(memory[1 : 128 * KIB])
        unaligned[:1] = b"b"
        assert bytes(memory[1:2]) != b"b", "it is a copy: nobody could use it there"


async def test_threads_may_share_memory(arena):
    made: list[memoryview | None] = []

    def make() -> None:
        for _ in range(50):
            memory = arena.allocate_shared(64 * KIB)
            made.append(memory)
            assert memory is not None
            memory[:] = bytes(64 * KIB)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        arena.drop(place(arena, 64 * KIB))
        await asyncio.sleep(0)
    assert len(made) == arena.statistics()["used_blocks"] == 200
    drop = threading.Thread(target=made.clear)
    drop.start()
    drop.join()
    await turns_until(lambda: arena.statistics()["used_blocks"] == 0)


async def test_no_room_to_share(arena, monkeypatch, caplog):
    assert arena.allocate_shared(65 * MIB) is None

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ArenaFile, "reserve", fail)
    assert arena.allocate_shared(MIB) is None
    gc.collect()
    await turns_until(lambda: arena.statistics()["used_blocks"] == 0)
    assert arena.statistics()["resident_bytes"] == 0
    assert "No space left" in caplog.text


async def test_shared_memory_outlives_the_arena():
    made = Arena(capacity_bytes=64 * MIB, from_bytes=64 * KIB, window_bytes=64 * MIB)
    memory = made.allocate_shared(MIB)
    memory[:4] = b"here"
    await made.aclose()
    assert made.allocate_shared(MIB) is None
    assert not made.wants([memory], MIB)
    del made
    gc.collect()
    assert bytes(memory[:4]) == b"here"


async def test_a_shared_tensor_beside_which_there_is_no_memory(monkeypatch):
    async with sharing() as both:
        memory = both.near_arena.allocate_shared(MIB)
        memory[:] = b"s" * MIB

        def fail(*_, **__):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(ArenaFile, "copy", fail)
        assert await both.send(memory, b"x" * MIB) == [b"s" * MIB, b"x" * MIB]
        statistics = both.near_arena.statistics()
        assert (statistics["used_blocks"], statistics["resident_bytes"]) == (1, MIB)


LENDER = """
import asyncio, os, sys, msgspec
from arpc.transport.shm import Arena
async def main():
    arena = Arena(capacity_bytes=64 << 20, from_bytes=1, window_bytes=1)
    for size in (1 << 20, 8 << 20):
        placement = arena.place([memoryview(b"x" * size)])
        placement.copy()
        print(placement.offsets[0])
    print(msgspec.json.encode(arena.file.offer).decode(), flush=True)
    sys.stdin.read()
asyncio.run(main())
"""


async def test_what_a_killed_lender_leaves_is_what_is_held():
    jobs: list[threading.Thread] = []

    def run(job):
        jobs.append(threading.Thread(target=job))
        jobs[-1].start()

    borrowings = Borrowings(asyncio.get_running_loop(), run)
    process = subprocess.Popen((sys.executable, "-c", LENDER), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        kept, other = int(process.stdout.readline()), int(process.stdout.readline())
        offer = msgspec.json.decode(process.stdout.readline(), type=ArenaOffer)
        descriptor = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_RDWR)
        borrowed = borrowings.map(7, offer)
        (view,) = borrowed.borrow([kept], [MIB])
        assert borrowed.borrow([other], [8 * MIB])
        borrowings.release(7, borrowed)
        assert os.fstat(descriptor).st_blocks * 512 > 9 * MIB
    finally:
        process.kill()
        process.communicate()
    await turns_until(lambda: jobs)
    jobs[0].join()
    assert os.fstat(descriptor).st_blocks * 512 == MIB
    os.close(descriptor)
    assert bytes(view[:2]) == b"xx"
    del view, borrowed
    await turns_until(lambda: borrowings.statistics()["mapped_arenas"] == 0)
