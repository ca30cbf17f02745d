"""Workers that die, fall silent, or are told to end: those who wait for them hear of it in time."""

from __future__ import annotations

import asyncio
import signal

import pytest
import torch

import arpc
from tests.integration import functions
from tests.integration.processes import Processes, impatience

MIB = 1 << 20


async def test_a_killed_callee_fails_its_calls_at_once(processes: Processes):
    async with processes.group("victim", "other", main=functions.serve) as worker:
        before = worker.rpc_async("other", functions.hang, args=([],), timeout=0)
        calls = [worker.rpc_async("victim", functions.hang, args=([],), timeout=0) for _ in range(50)]
        through_other = worker.rpc_async("other", functions.hang, args=(["victim"],), timeout=0)
        assert await worker.rpc_sync("victim", functions.wait_for, args=("started",)) > 0
        assert await worker.rpc_sync("other", functions.wait_for, args=("started",)) > 0
        await worker.rpc_sync("victim", functions.echo, args=(1,))
        large = worker.rpc_async("victim", functions.plain_echo, args=(torch.ones(64 * MIB),), timeout=0)
        processes["victim"].kill()
        for call in [*calls, large, through_other]:
            with pytest.raises(arpc.WorkerLostError, match="'victim'") as lost:
                await call
            assert lost.value.worker == "victim"
            assert "not been heard of" not in str(lost.value), "it is not the silence that tells"
        # the others go on as if nothing had happened
        assert not before.done()
        assert await worker.rpc_sync("other", functions.echo, args=(2,)) == 2
        with pytest.raises(arpc.WorkerLostError, match="'victim'") as lost:
            await worker.rpc_sync("victim", functions.echo, args=(3,))
        assert not lost.value.may_have_run
        before.cancel()


async def test_a_stopped_callee_fails_its_calls_within_the_heartbeat_time(processes: Processes):
    async with processes.group("sleepy", "other", main=functions.serve) as worker:
        call = worker.rpc_async("sleepy", functions.hang, args=([],), timeout=0)
        await worker.rpc_sync("sleepy", functions.wait_for, args=("started",))
        processes["sleepy"].signal(signal.SIGSTOP)
        with (
            impatience(worker),
            pytest.raises(arpc.WorkerLostError, match="'sleepy' was lost: it has not been heard of for"),
        ):
            await call
        assert await worker.rpc_sync("other", functions.echo, args=(1,)) == 1
        processes["sleepy"].signal(signal.SIGCONT)
        # It finds its connection closed, and its callers gone. It can be called again, and so can others by it.
        assert await worker.rpc_sync("sleepy", functions.wait_for, args=("cancelled",)) == 1
        assert await worker.rpc_sync("sleepy", functions.relay, args=(["other", "test"], 5)) == (
            ["sleepy", "other", "test"],
            5,
        )


async def test_a_short_pause_harms_nobody(processes: Processes):
    async with processes.group("sleepy", main=functions.serve) as worker:
        await worker.rpc_sync("sleepy", functions.echo, args=(0,))
        processes["sleepy"].signal(signal.SIGSTOP)
        calls = [worker.rpc_async("sleepy", functions.echo, args=(number,)) for number in range(100)]
        await asyncio.sleep(0.4)  # longer than the interval, far shorter than the timeout
        processes["sleepy"].signal(signal.SIGCONT)
        assert await asyncio.gather(*calls) == list(range(100))
        assert worker.statistics()["peers"]["sleepy"]["connects"] == 1


async def test_handlers_of_a_dead_caller_are_cancelled(processes: Processes):
    async with processes.group("caller", "callee", main=functions.serve) as worker:
        call = worker.rpc_async("caller", functions.hang, args=(["callee"],), timeout=0)
        await worker.rpc_sync("callee", functions.wait_for, args=("started",))
        processes["caller"].kill()
        assert await worker.rpc_sync("callee", functions.wait_for, args=("cancelled",), timeout=10) == 1
        with pytest.raises(arpc.WorkerLostError, match="'caller'"):
            await call
        statistics = await worker.rpc_sync("callee", functions.statistics)
        assert statistics["connector"]["connections"] == 1


async def test_a_stream_stops_when_its_consumer_dies(processes: Processes):
    async with processes.group("consumer", "producer", main=functions.serve) as worker:
        consuming = worker.rpc_async("consumer", functions.consume, args=("producer",), timeout=0)
        assert await worker.rpc_sync("consumer", functions.wait_for, args=("item",)) > 0
        processes["consumer"].kill()
        assert await worker.rpc_sync("producer", functions.wait_for, args=("stream closed",), timeout=10) == 1
        with pytest.raises(arpc.WorkerLostError, match="'consumer'"):
            await consuming


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, -signal.SIGTERM)])
async def test_a_signal_during_calls_ends_a_worker_cleanly(processes: Processes, number: signal.Signals, code: int):
    async with processes.group("told", "other", main=functions.serve) as worker:
        assert len(processes.sockets()) == 3
        to_told = worker.rpc_async("told", functions.hang, args=(["other"],), timeout=0)
        await worker.rpc_sync("other", functions.wait_for, args=("started",))
        processes["told"].signal(number)
        assert await processes["told"].ended() == code
        with pytest.raises((arpc.WorkerLostError, arpc.CallCancelledError), match="'told'"):
            await to_told
        with pytest.raises(arpc.WorkerLostError, match="'told' has left"):
            await worker.rpc_sync("told", functions.echo, args=(1,))
        assert await worker.rpc_sync("other", functions.wait_for, args=("cancelled",), timeout=10) == 1
        assert len(processes.sockets()) == 2
        output = processes["told"].output
        assert "Task was destroyed" not in output
        assert "never retrieved" not in output
        assert "ERROR" not in output
