"""A child that a handler forks has nothing of the worker: its death is noticed, and its addresses are free, at once."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import arpc
from tests.integration import functions
from tests.integration.processes import Processes, Start

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="takes fork")

PATIENT = arpc.RpcOptions(gc_freeze=False, heartbeat_interval=0.2, heartbeat_timeout=600.0, init_timeout=30.0)
"""Silence tells nothing within the time of a test."""

_children: list[multiprocessing.process.BaseProcess] = []


async def fork_sleeper() -> int:
    """Fork on the loop, between two steps; the id of the child, which sleeps until it is killed."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    return child


def fork_sleeper_in_thread() -> int:
    """Fork as a DataLoader does, in a thread of the worker."""
    process = multiprocessing.get_context("fork").Process(target=signal.pause)
    process.start()
    _children.append(process)
    assert process.pid is not None
    return process.pid


async def spawn_sleeper() -> int:
    """Start a program, with all descriptors that a child may have."""
    return subprocess.Popen(["sleep", "600"], close_fds=False).pid


def load_batches() -> float:
    """Use forked worker processes, and let them end."""
    loader = DataLoader(TensorDataset(torch.arange(64.0)), batch_size=8, num_workers=2)
    return float(sum(batch[0].sum() for batch in loader))


async def call_in_child() -> str:
    """Be a worker of another group in a forked child; what came of it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = asyncio.run(_meet_oneself())
        except BaseException as error:  # noqa: BLE001 - told to the parent
            text = repr(error)
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = await asyncio.to_thread(pipe.read)
    os.waitpid(child, 0)
    return text


async def _meet_oneself() -> str:
    # a new context: that of the handler is the parent's
    async with arpc.init_rpc("lone", rank=0, world_size=1, init_method="tcp://127.0.0.1:0", options=PATIENT) as worker:
        return await worker.rpc_sync("lone", functions.echo, args=("answered",))


@asynccontextmanager
async def killed(child: int) -> AsyncIterator[None]:
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


FORKS = pytest.mark.parametrize("fork", [fork_sleeper, fork_sleeper_in_thread, spawn_sleeper])


@FORKS
@pytest.mark.parametrize("listen", [(), ("tcp://127.0.0.1:0",)], ids=["unix", "tcp"])
async def test_a_death_is_noticed_at_once(processes: Processes, fork, listen: tuple[str, ...]):
    options = replace(PATIENT, listen=listen)
    async with processes.group("victim", "other", main=functions.serve, options=options) as worker:
        await worker.rpc_sync("victim", functions.relay, args=(["other", "victim", "test"], 0))
        pending = worker.rpc_async("victim", functions.hang, args=([],), timeout=0)
        elsewhere = worker.rpc_async("other", functions.hang, args=(["victim"],), timeout=0)
        assert await worker.rpc_sync("victim", functions.wait_for, args=("started",)) > 0
        async with killed(await worker.rpc_sync("victim", fork)):
            # the child has said nothing to anybody: the worker goes on
            assert await worker.rpc_sync("victim", functions.relay, args=(["other", "victim"], 1)) == (
                ["victim", "other", "victim"],
                1,
            )
            processes["victim"].kill()
            async with asyncio.timeout(20):
                for call in (pending, elsewhere):
                    with pytest.raises(arpc.WorkerLostError, match="'victim'"):
                        await call
            with pytest.raises(arpc.WorkerLostError, match="'victim' cannot be reached"):
                await worker.rpc_sync("victim", functions.echo, args=(3,))


@FORKS
async def test_a_successor_comes_at_once(processes: Processes, fork):
    init_method = processes.init_method
    test = await Start("test", init_method, options=PATIENT).join()
    try:
        first = processes.start(Start("a", init_method, options=PATIENT), functions.serve)
        await first.told()
        async with killed(await test.rpc_sync("a", fork)):
            first.kill()
            second = processes.start(Start("a", init_method, options=PATIENT), functions.serve)
            async with asyncio.timeout(20):
                await second.told()
                assert await test.rpc_sync("a", functions.where) == ("a", second.pid)
    finally:
        await test.shutdown(graceful=False)


async def host_and_fork(start: Start, tell) -> None:
    """Host the store of a group, and a dashboard, and fork while somebody is connected to both."""
    async with start.join() as worker:
        ports = [
            int(str(url).rpartition(":")[2])
            for url in (worker.statistics()["rendezvous"]["store"], worker.http_address)
        ]
        writers = [(await asyncio.open_connection("127.0.0.1", port))[1] for port in ports]
        await worker.rpc_sync(worker.name, functions.echo, args=(1,))
        tell((ports, await fork_sleeper()))
        await functions.leaving.wait()
        for writer in writers:
            writer.close()


async def test_ports_of_a_dead_host_are_free(processes: Processes):
    options = replace(PATIENT, http="127.0.0.1:0")
    process = processes.start(Start("host", "tcp://127.0.0.1:0", options=options), host_and_fork)
    ports, child = await process.told()
    async with killed(child):
        process.kill()
        for port in ports:
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)


async def test_forked_workers_of_a_data_loader_do_their_work(processes: Processes):
    async with processes.group("loads", main=functions.serve, options=PATIENT) as worker:
        for _ in range(2):
            assert await worker.rpc_sync("loads", load_batches) == sum(range(64))
        statistics = await worker.rpc_sync("loads", functions.statistics)
        assert statistics["peers"]["test"]["connects"] == 1


async def test_a_forked_child_can_be_a_worker_of_its_own(processes: Processes):
    async with processes.group("forks", main=functions.serve, options=PATIENT) as worker:
        assert await worker.rpc_sync("forks", call_in_child) == "answered"
        assert await worker.rpc_sync("forks", functions.echo, args=(1,)) == 1
