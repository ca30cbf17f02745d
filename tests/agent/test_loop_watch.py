from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest

import arpc
from arpc.agent import loop_watch
from arpc.testing import cluster


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_watch, "LIMIT_S", 0.1)


async def block_the_loop(seconds: float) -> None:
    time.sleep(seconds)


async def wait_for_long(seconds: float) -> None:
    await asyncio.sleep(seconds)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "arpc-loop-watch" and thread.is_alive()]


async def test_a_handler_that_blocks_is_named_once(quick: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "arpc.loop"):
        async with cluster(2):
            await arpc.rpc_sync("worker1", block_the_loop, (0.6,))
    (record,) = [record for record in caplog.records if record.name == "arpc.loop"]
    line = block_the_loop.__code__.co_firstlineno
    assert record.getMessage() == (
        f"block_the_loop ({__file__}:{line}) has kept the event loop of worker 'worker0', 'worker1' for more than "
        f"0.1 s, and no other call ran there. It is at {__file__}:{line + 1}. Let a plain `def`, which runs in a "
        f"thread, do what takes long, or call `await arpc.to_thread(...)`"
    )


async def test_waiting_is_not_blocking(quick: None, caplog: pytest.LogCaptureFixture) -> None:
    async with cluster(2):
        await asyncio.gather(
            arpc.rpc_sync("worker1", wait_for_long, (0.3,)), arpc.rpc_sync("worker1", time.sleep, (0.3,))
        )
    assert not [record for record in caplog.records if record.name == "arpc.loop"]


async def test_one_thread_watches_as_long_as_there_are_workers() -> None:
    async with cluster(3):
        assert len(threads()) == 1
    for thread in threads():
        thread.join(10)
    assert not threads()
