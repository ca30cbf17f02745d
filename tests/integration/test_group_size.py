"""A large group comes together in a number of steps that each worker takes, however many others there are."""

from __future__ import annotations

import asyncio

import pytest

import arpc
from arpc.launch.meeting import StoreServer
from tests.integration.processes import QUICK

OPERATIONS = 30
OPERATIONS_PER_POLL = 3  # looking whether all have come: how often depends on how long they take


@pytest.mark.usefixtures("runtime_directory")
async def test_64_workers_come_up_and_pass_a_barrier(monkeypatch: pytest.MonkeyPatch):
    size = 64
    server = StoreServer()
    await server.serve()
    # as under the launcher, where workers are clients of a store that is there
    monkeypatch.setenv("MASTER_ADDR", server.host)
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    options = QUICK.replace(shared_memory_bytes=0, heartbeat_interval=0.0, listen=("unix://",))

    async def join(rank: int) -> arpc.Worker:
        return await arpc.init_rpc(rank=rank, world_size=size, options=options)

    try:
        # each in a task of its own, as each is the worker of its context
        workers = await asyncio.gather(*(asyncio.create_task(join(rank)) for rank in range(size)))
        try:
            gathered = await asyncio.gather(
                *(worker.rendezvous.gather("barrier", b"%d" % worker.id, timeout_s=50) for worker in workers)
            )
            assert all(values == {rank: b"%d" % rank for rank in range(size)} for values in gathered)
            for worker in workers:
                assert len(worker.get_worker_infos()) == size
                assert all(peer.connection is None for peer in worker.agent.peers)  # until somebody calls
                found = worker.statistics()["rendezvous"]
                assert found["store_operations"] <= OPERATIONS + OPERATIONS_PER_POLL * found["store_polls"]
        finally:
            await asyncio.gather(*(asyncio.create_task(worker.shutdown()) for worker in workers))
    finally:
        await server.aclose()
