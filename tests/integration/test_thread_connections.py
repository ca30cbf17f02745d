"""Threads that block on a worker that dies or falls silent hear of it in time."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

import arpc
from arpc.compat.blocking_client.calls import BlockingCalls
from tests.integration import functions
from tests.integration.processes import Processes, impatience


async def start_blocking_call(worker: Any, name: str) -> asyncio.Future[Any]:
    """A call of `hang` in a thread of its own, on a connection, that has begun."""
    calls = BlockingCalls(worker.agent)
    peer = worker.agent.known_peer(name)
    packed = await asyncio.to_thread(worker.agent.prepare, peer, functions.hang, ([],), None)
    # as soon as there is a connection it is taken, so this is not what hangs
    probe = await asyncio.to_thread(worker.agent.prepare, peer, functions.echo, (0,), None)
    await worker.rpc_sync(name, functions.echo, args=(0,))
    async with asyncio.timeout(60):
        while peer.thread_connections is None or not peer.thread_connections.free:
            await asyncio.to_thread(calls.call, peer, functions.echo, probe, 0)
            await asyncio.sleep(0)
    call = asyncio.ensure_future(asyncio.to_thread(calls.call, peer, functions.hang, packed, 0))
    assert await worker.rpc_sync(name, functions.wait_for, args=("started",)) == 1
    assert len(peer.thread_connections.under_way) == 1
    return call


async def test_a_killed_callee_ends_calls_on_thread_connections_at_once(processes: Processes):
    async with processes.group("victim", "other", main=functions.serve) as worker:
        call = await start_blocking_call(worker, "victim")
        processes["victim"].kill()
        with pytest.raises(arpc.WorkerLostError, match=r"'victim' was lost: .*\(hang may have run\)") as lost:
            await call
        assert lost.value.may_have_run
        assert "not been heard of" not in str(lost.value), "it is not the silence that tells"
        assert await worker.rpc_sync("other", functions.echo, args=(2,)) == 2


async def test_a_stopped_callee_ends_calls_on_thread_connections_within_the_heartbeat_time(processes: Processes):
    async with processes.group("sleepy", main=functions.serve) as worker:
        call = await start_blocking_call(worker, "sleepy")
        processes["sleepy"].signal(signal.SIGSTOP)
        with (
            impatience(worker),
            pytest.raises(arpc.WorkerLostError, match="'sleepy' was lost: it has not been heard of for"),
        ):
            await call
        processes["sleepy"].signal(signal.SIGCONT)
        # it finds that its caller is gone
        assert await worker.rpc_sync("sleepy", functions.wait_for, args=("cancelled",)) == 1
