"""Calls that are packed in the thread that makes them, and timeouts that are the caller's own."""

from __future__ import annotations

import asyncio
import threading

import pytest

import arpc
from arpc.agent.client.pending_calls import Call
from arpc.agent.client.sender import Prepared
from arpc.errors import RpcTimeoutError, SerializationError
from arpc.testing import cluster
from tests.agent.leftovers import until


def add(a: int, b: int = 0) -> int:
    return a + b


def nothing() -> None:
    pass


def fail() -> None:
    raise ValueError("on purpose")


_released = threading.Event()
_ended = threading.Event()


def wait_and_tell() -> None:
    _released.wait(30)
    _ended.set()


async def time_left() -> float | None:
    return arpc.remaining_time()


async def test_arguments_are_packed_in_a_thread_and_sent_on_the_loop() -> None:
    async with cluster(2) as group:
        agent = group[0].agent
        peer = agent.known_peer("worker1")
        for function, args, kwargs, expected in (
            (add, (1, 2), None, 3),
            (add, [1], {"b": 5}, 6),
            (nothing, None, None, None),
            (lambda a: a * 2, (4,), None, 8),
        ):
            packed = await asyncio.to_thread(agent.prepare, peer, function, args, kwargs)
            future = asyncio.get_running_loop().create_future()
            called, named = (packed.function, packed.kwargs) if packed else (function, None)
            agent.sender.send(Call(peer, future, called, packed, named))
            assert await future == expected


async def test_what_cannot_travel_is_refused_where_it_is_packed() -> None:
    async with cluster(2) as group:
        agent = group[0].agent
        with pytest.raises(SerializationError, match="argument 'a' of add"):
            await asyncio.to_thread(agent.prepare, agent.known_peer("worker1"), add, (threading.Lock(),), None)


async def test_what_was_packed_for_a_peer_that_has_changed_is_packed_again() -> None:
    async with cluster(2) as group:
        agent = group[0].agent
        peer = agent.known_peer("worker1")
        packed = agent.prepare(peer, add, (1, 2), None)
        assert isinstance(packed, Prepared)
        future = asyncio.get_running_loop().create_future()
        agent.sender.send(Call(peer, future, add, packed._replace(is_named=False, pickle=b"?")))
        assert await future == 3


async def test_the_default_timeout_changes_at_once() -> None:
    async with cluster(2) as group:
        _released.clear()
        group[0].agent.timeouts.default_s = 0.01
        with pytest.raises(RpcTimeoutError):
            await arpc.rpc_sync("worker1", wait_and_tell)
        _released.set()
        with pytest.raises(ValueError, match="0 \\(none\\) or more"):
            group[0].agent.timeouts.default_s = -1


async def test_timeouts_that_do_not_travel_end_nothing_elsewhere() -> None:
    options = arpc.RpcOptions(gc_freeze=False, timeouts_travel=False)
    async with cluster(2, options=options):
        assert await arpc.rpc_sync("worker1", time_left, timeout=5) is None
        _released.clear()
        _ended.clear()
        with pytest.raises(RpcTimeoutError):
            await arpc.rpc_sync("worker1", wait_and_tell, timeout=0.01)
        _released.set()
        assert await asyncio.to_thread(_ended.wait, 30)


async def test_an_rref_whose_creation_timed_out_is_counted_until_it_is_dropped() -> None:
    options = arpc.RpcOptions(gc_freeze=False, timeouts_travel=False)
    async with cluster(2, options=options) as group:
        await arpc.rpc_sync("worker1", nothing)  # so that there is a connection
        _released.clear()
        rref = arpc.remote("worker1", wait_and_tell, timeout=0.01)
        with pytest.raises(arpc.RRefCreationError):
            await rref
        _released.set()
        assert len(group[1].rref_context.forks.owned) == 1
        await rref.release()
        await until(lambda: not group[1].rref_context.forks.owned)  # once the creation has ended, in its thread


async def test_failures_are_told_of_where_they_happen() -> None:
    async with cluster(2) as group:
        told: list[tuple[str, BaseException]] = []
        group[1].agent.dispatcher.replies.on_failure = lambda name, error: told.append((name, error))
        with pytest.raises(ValueError, match="on purpose"):
            await arpc.rpc_sync("worker1", fail)
        assert [(name, type(error)) for name, error in told] == [("fail", ValueError)]
