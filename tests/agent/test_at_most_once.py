"""A call runs once or not at all, whatever the network does; and what was not sent yet goes out when it can."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

import arpc
from arpc.errors import WireError, WorkerLostError
from arpc.testing import Fault, FaultyTransport, cluster
from arpc.transport.in_process import MemoryNetwork
from arpc.wire.messages import MessageType
from tests.agent.leftovers import assert_nothing_left, until, warm_up
from tests.agent.stage import echo, hold

OPTIONS = arpc.RpcOptions(gc_freeze=False, rpc_timeout=20)
runs: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def _no_runs_yet() -> None:
    runs.clear()


async def counted(name: str, value: Any = None) -> Any:
    runs[name] += 1
    return value


async def counted_later(name: str, value: Any = None) -> Any:
    runs[name] += 1
    await asyncio.sleep(0.01)
    return value


def counted_in_thread(name: str, value: Any = None) -> Any:
    runs[name] += 1
    return value


@arpc.inline
def counted_inline(name: str, value: Any = None) -> Any:
    runs[name] += 1
    return value


async def counted_items(name: str) -> AsyncIterator[int]:
    runs[name] += 1
    for number in range(3):
        yield number


@pytest.mark.parametrize("function", [counted, counted_later, counted_in_thread, counted_inline])
@pytest.mark.parametrize("value", [None, 7, torch.ones(10), torch.ones(100_000)], ids=["none", "int", "small", "large"])
async def test_a_request_that_comes_twice_runs_once(function, value):
    network = FaultyTransport(MemoryNetwork())
    async with cluster(2, options=OPTIONS, transports={"memory": network}) as group:
        await warm_up(group)
        network.inject(Fault(MessageType.REQUEST, "duplicate"))
        for number in range(5):
            name = f"n{number}"
            result = await group[0].rpc_sync("worker1", function, args=(name, value))
            assert torch.equal(result, value) if isinstance(value, torch.Tensor) else result == value
        assert await group[0].rpc_sync("worker1", echo) is None
        await assert_nothing_left(group)
        assert network.injected[MessageType.REQUEST, "duplicate"] == 6
        assert runs == {f"n{number}": 1 for number in range(5)}


async def test_a_stream_that_is_asked_for_twice_is_made_once():
    network = FaultyTransport(MemoryNetwork(), [Fault(MessageType.REQUEST, "duplicate")])
    async with cluster(2, options=OPTIONS, transports={"memory": network}) as group:
        assert [item async for item in group[0].stream("worker1", counted_items, args=("stream",))] == [0, 1, 2]
        await assert_nothing_left(group)
        assert runs == {"stream": 1}


async def test_what_was_sent_fails_and_what_was_not_goes_out(stage):
    """The connection breaks with one call at the callee and more behind it, which wait for room."""
    block = b"x" * 30_000
    async with cluster(2, options=OPTIONS.replace(window_bytes=40_000)) as group:
        sent = group[0].rpc_async("worker1", hold, args=("held", block))
        await stage.wait_until("held begun")
        waiting = [group[0].rpc_async("worker1", counted, args=(f"n{number}", block)) for number in range(5)]
        assert len(group[0].agent.peer("worker1").backlog) == 5
        group[0].agent.peer("worker1").connection.abort(WireError("cut by the test"))
        with pytest.raises(
            WorkerLostError, match=r"'worker1' was lost: cut by the test \(.*hold may have run\)"
        ) as lost:
            await sent
        assert lost.value.may_have_run
        assert await asyncio.gather(*waiting) == [block] * 5
        assert runs == {f"n{number}": 1 for number in range(5)}
        await stage.wait_until("held cancelled")
        await assert_nothing_left(group)


async def test_calls_wait_for_a_network_that_comes_back(monkeypatch):
    attempts: list[float] = []
    loop = asyncio.get_running_loop()
    async with cluster(2, options=OPTIONS) as group:
        connect = group.network.connect

        async def connect_at_the_fourth(*arguments: Any) -> Any:
            attempts.append(loop.time())
            if len(attempts) < 4:
                raise OSError(113, "No route to host")
            return await connect(*arguments)

        monkeypatch.setattr(group.network, "connect", connect_at_the_fourth)
        assert await group[0].rpc_sync("worker1", counted, args=("call", 1)) == 1
        assert runs == {"call": 1}
        pauses = [later - earlier for earlier, later in itertools.pairwise(attempts)]
        # longer each time: at least half of 50, 100, 200 ms
        assert all(pause >= least for pause, least in zip(pauses, (0.024, 0.049, 0.099), strict=True)), pauses
        await assert_nothing_left(group)


async def test_what_waits_for_a_worker_that_was_replaced_never_ran(monkeypatch):
    async with cluster(2, options=OPTIONS, elastic=True) as group:
        await group[0].rpc_sync("worker1", echo)
        peer = group[0].agent.peer("worker1")
        resolve = group[0].agent.resolve
        is_asked, may_answer = asyncio.Event(), asyncio.Event()

        async def resolve_when_told(to: Any) -> Any:
            is_asked.set()
            await may_answer.wait()
            return await resolve(to)

        old = group[1].info
        peer.connection.abort(WireError("cut by the test"))
        await until(lambda: peer.connection is None)
        peer.is_verified = True  # as if it had been asked for just before it was replaced
        monkeypatch.setattr(group[0].agent, "resolve", resolve_when_told)
        call = group[0].rpc_async("worker1", counted, args=("call",))
        await is_asked.wait()
        await group[1].shutdown(graceful=False)
        await group.add("worker1")
        may_answer.set()
        with pytest.raises(WorkerLostError, match="started again before the call was sent") as lost:
            await call
        assert not lost.value.may_have_run
        assert not runs
        assert group[0].get_worker_info("worker1") != old
        assert await group[0].rpc_sync("worker1", counted, args=("again", 1)) == 1
        with pytest.raises(arpc.UnknownWorkerError):
            await group[0].rpc_sync(old, counted, args=("to the old one",))
        await assert_nothing_left(group)
