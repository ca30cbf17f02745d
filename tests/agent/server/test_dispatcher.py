"""How requests are admitted, run and answered: limits per peer, slow readers, and exactly one reply each."""

from __future__ import annotations

import asyncio
import pickle

import pytest
import torch

import arpc
from arpc.agent.server.dispatcher import Inbound
from arpc.errors import ProtocolError
from arpc.testing import Cluster, cluster
from arpc.wire.frames import frame
from arpc.wire.messages import MessageType
from tests.agent.leftovers import assert_nothing_left, until
from tests.agent.shared_memory import BusySharedMemory
from tests.agent.stage import echo, echo_in_thread, echo_later, hold, hold_in_thread


def inbound_of(group: Cluster, callee: int = 1, caller: str = "worker0") -> Inbound:
    """What one worker keeps of the requests of another."""
    (inbound,) = [link for link in group[callee].agent.connector._links.values() if link.peer.info.name == caller]
    return inbound


async def until_waiting(group: Cluster, count: int) -> None:
    """So many requests of worker0 wait at worker1."""
    inbound = inbound_of(group)
    await until(lambda: len(inbound.waiting) == count, lambda: len(inbound.waiting))


@pytest.mark.parametrize("type_", [MessageType.REQUEST, MessageType.RREF_FETCH])
async def test_a_request_that_brings_nothing_is_refused(pair, type_):
    replies = pair[1].agent.dispatcher.replies
    await pair[0].rpc_sync("worker1", echo)
    before = replies.calls_failed
    pair[0].agent.known_peer("worker1").connection.send(frame(type_, 0, 1 << 40, 0, 0, b""))
    await until(lambda: replies.calls_failed == before + 1)
    assert await pair[0].rpc_sync("worker1", echo, args=(1,)) == 1
    await assert_nothing_left(pair)


# -- at most so many handlers at once


@pytest.mark.parametrize("handler", [hold, hold_in_thread])
async def test_excess_requests_wait_packed(stage, handler):
    options = arpc.RpcOptions(max_handlers_per_peer=2, gc_freeze=False)
    async with cluster(2, options=options) as group:
        futures = [group[0].rpc_async("worker1", handler, args=(f"n{number}", number)) for number in range(6)]
        await stage.wait_until("n0 begun", "n1 begun")
        await until_waiting(group, 4)
        assert len(inbound_of(group).running) == 2
        assert not stage.was_reached("n2 begun")
        stage.open()
        assert await asyncio.gather(*futures) == list(range(6))
        assert [point for point in stage.log if point.endswith("begun")] == [f"n{n} begun" for n in range(6)], (
            "in order"
        )
        await assert_nothing_left(group)


async def test_a_waiting_request_that_is_cancelled_is_removed(stage):
    options = arpc.RpcOptions(max_handlers_per_peer=1, gc_freeze=False)
    async with cluster(2, options=options) as group:
        futures = [group[0].rpc_async("worker1", hold, args=(f"n{number}", number)) for number in range(4)]
        await stage.wait_until("n0 begun")
        await until_waiting(group, 3)
        futures[1].cancel()
        futures[2].cancel()
        await until_waiting(group, 1)
        stage.open()
        assert await futures[0] == 0
        assert await futures[3] == 3
        assert not stage.was_reached("n1 begun")
        assert not stage.was_reached("n2 begun")
        await assert_nothing_left(group)


async def test_a_waiting_stream_that_is_closed_is_removed(stage):
    options = arpc.RpcOptions(max_handlers_per_peer=1, gc_freeze=False)
    async with cluster(2, options=options) as group:
        held = group[0].rpc_async("worker1", hold)
        await stage.wait_until("held begun")
        closed = group[0].stream("worker1", count_up, args=(3,))
        kept = group[0].stream("worker1", count_up, args=(3,), window=1)
        await until_waiting(group, 2)
        await closed.aclose()
        await until_waiting(group, 1)
        stage.open()
        await held
        assert [item async for item in kept] == [0, 1, 2], "it kept the credit it came with"
        await assert_nothing_left(group)


async def count_up(stop: int):
    for number in range(stop):
        yield number


async def test_ten_thousand_waiting_requests_are_cancelled_quickly(stage):
    """Cancelling one does not look at all the others."""
    asyncio.get_running_loop().set_debug(False)
    options = arpc.RpcOptions(max_handlers_per_peer=1, gc_freeze=False)
    async with cluster(2, options=options) as group:
        held = group[0].rpc_async("worker1", hold)
        await stage.wait_until("held begun")
        futures = [group[0].rpc_async("worker1", echo) for _ in range(10_000)]
        await until_waiting(group, 10_000)
        for future in reversed(futures):
            future.cancel()
        await until_waiting(group, 0)
        stage.open()
        await held
        await assert_nothing_left(group)


async def test_the_limit_is_per_peer(stage):
    options = arpc.RpcOptions(max_handlers_per_peer=1, gc_freeze=False)
    async with cluster(3, options=options) as group:
        held = group[0].rpc_async("worker1", hold)
        await stage.wait_until("held begun")
        waiting = group[0].rpc_async("worker1", echo, args=("waits",))
        assert await group[2].rpc_sync("worker1", echo, args=("passes",)) == "passes"
        assert not waiting.done()
        stage.open()
        await held
        assert await waiting == "waits"
        await assert_nothing_left(group)


async def test_a_lost_connection_forgets_requests_that_wait(stage):
    options = arpc.RpcOptions(max_handlers_per_peer=1, gc_freeze=False)
    async with cluster(2, options=options) as group:
        futures = [group[0].rpc_async("worker1", hold, args=(f"n{number}",)) for number in range(3)]
        await stage.wait_until("n0 begun")
        await until_waiting(group, 2)
        group[0].agent.peer("worker1").connection.abort(arpc.WireError("cut by the test"))
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert all(isinstance(result, arpc.WorkerLostError) for result in results)
        await stage.wait_until("n0 cancelled")
        await assert_nothing_left(group)
        assert not stage.was_reached("n1 begun")


async def test_calls_back_to_the_caller_pass_a_full_table(stage):
    """Both sides wait for each other's handlers: limits count those of one peer at one worker, so neither starves."""
    options = arpc.RpcOptions(max_handlers_per_peer=1, gc_freeze=False)
    async with cluster(2, options=options) as group:
        assert await group[0].rpc_sync("worker1", ask_back, args=(1,)) == 1
        await assert_nothing_left(group)


async def ask_back(depth: int) -> int:
    return await arpc.rpc_sync("worker0", echo, args=(depth,))


# -- a caller that does not take its replies


async def test_requests_wait_while_their_caller_does_not_read():
    """Replies are kept for it up to the window; what it asks beyond that is not even begun."""
    # without heartbeats, which are output too and make the queue look again
    options = arpc.RpcOptions(window_bytes=1 << 20, gc_freeze=False, heartbeat_interval=0)
    async with cluster(2, options=options) as group:
        await group[0].rpc_sync("worker1", echo)
        inbound = inbound_of(group)
        connection = inbound.connection
        # the caller's side reads nothing, until it is let to
        reader = group[0].agent.peer("worker1").connection
        deliver, reader._deliver = reader._deliver, lambda: None
        futures = [group[0].rpc_async("worker1", make_ones, args=(1 << 18,)) for _ in range(40)]
        await until(lambda: bool(inbound.waiting))
        for _ in range(100):
            await asyncio.sleep(0)
        assert 1 << 19 < connection.unsent_bytes <= (1 << 20) + 4096, "about the window"
        assert len(inbound.waiting) > 30
        reader._deliver = deliver
        reader._delivery = None
        reader._schedule()
        for future in futures:
            assert (await future).numel() == 1 << 18
        await assert_nothing_left(group)


@pytest.mark.parametrize("ask_meanwhile", [True, False])
async def test_requests_wait_while_replies_wait_to_be_copied(ask_meanwhile):
    """One large reply after another that nobody copies yet would only fill memory."""
    async with cluster(2) as group:
        await group[0].rpc_sync("worker1", echo)
        inbound = inbound_of(group)
        shared_memory = BusySharedMemory(inbound.connection)
        assert await group[0].rpc_sync("worker1", echo, args=(1,)) == 1, "no large reply, no reason to wait"
        large = [group[0].rpc_async("worker1", make_ones, args=(1 << 18,)) for _ in range(8 if ask_meanwhile else 1)]
        assert (await large[0]).numel() == 1 << 18
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(inbound.waiting) == len(large) - 1
        shared_memory.is_behind = False
        inbound.connection.notify_drained()
        assert await group[0].rpc_sync("worker1", echo, args=(2,)) == 2
        for future in large:
            assert (await future).numel() == 1 << 18
        await assert_nothing_left(group)


@arpc.inline
def make_ones(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.uint8)


# -- replies


async def test_each_request_is_answered_once(pair):
    dispatcher = pair[1].agent.dispatcher
    before = dispatcher.calls_handled
    functions = [echo, echo_later, echo_in_thread] * 10
    await asyncio.gather(*(pair[0].rpc_sync("worker1", function, args=(1,)) for function in functions))
    assert dispatcher.calls_handled == before + len(functions)
    assert dispatcher.replies.calls_failed == 0


async def test_statistics_tell_what_is_under_way(pair, stage):
    futures = [pair[0].rpc_async("worker1", hold), pair[0].rpc_async("worker1", hold_in_thread, args=("thread",))]
    await stage.wait_until("held begun", "thread begun")
    statistics = pair[1].statistics()["executor"]
    assert statistics["handlers_waiting"] == 1
    assert statistics["jobs_unfinished"] == 1
    stage.open()
    await asyncio.gather(*futures)


@pytest.mark.parametrize("value", [None, 0, "", b"", [], torch.empty(0), torch.tensor(1.0), float("inf")])
async def test_values_of_all_sizes_come_back(pair, value):
    for function in (echo, echo_later, echo_in_thread):
        result = await pair[0].rpc_sync("worker1", function, args=(value,))
        assert type(result) is type(value)
        assert torch.equal(result, value) if isinstance(value, torch.Tensor) else result == value


async def test_a_request_for_a_function_that_was_never_sent(pair, monkeypatch, caplog):
    peer = pair[0].agent.peer("worker1")
    monkeypatch.setitem(peer.function_ids, echo, 999)
    with pytest.raises(ProtocolError, match="function 999, which was never sent"):
        await pair[0].rpc_sync("worker1", echo)
    assert "function 999" in caplog.text
    assert await pair[0].rpc_sync("worker1", echo_later, args=("alive",)) == "alive"


async def test_a_malformed_request_fails_that_call_only(pair, monkeypatch):
    """The frame is in order, its content is not."""
    pickler = pair[0].agent.codec.pickler
    dumps_call = pickler.dumps_call
    monkeypatch.setattr(pickler, "dumps_call", lambda *_, **__: (b"no pickle", []))
    with pytest.raises(pickle.UnpicklingError):
        await pair[0].rpc_sync("worker1", echo, args=(1,))
    monkeypatch.setattr(pickler, "dumps_call", dumps_call)
    assert await pair[0].rpc_sync("worker1", echo, args=("alive",)) == "alive"
