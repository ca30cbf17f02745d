"""Workers that only a network connects, and what large tensors cost them in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration import functions
from tests.integration.namespaces import two_hosts
from tests.integration.processes import QUICK, Processes, run_scripts

MIB = 1 << 20
FAR_WORKER = str(Path(__file__).parent / "scripts" / "far_worker.py")
STORE_PORT = 29500  # in a namespace of its own every port is free


async def test_a_large_tensor_is_copied_on_neither_side(processes: Processes):
    options = QUICK.replace(listen=("tcp://127.0.0.1:0",), shared_memory_bytes=0, heartbeat_timeout=20.0)
    size = 256 * MIB
    async with processes.group("sender", "receiver", main=functions.serve, options=options) as worker:
        await worker.rpc_sync("sender", functions.send, args=("receiver", MIB))  # what is needed once
        before = await worker.rpc_sync("receiver", functions.peak_memory_bytes)

        growth_of_sender = await worker.rpc_sync("sender", functions.send, args=("receiver", size))

        growth_of_receiver = await worker.rpc_sync("receiver", functions.peak_memory_bytes) - before
        assert growth_of_sender < 0.05 * size
        assert 0.9 * size < growth_of_receiver < 1.1 * size


@pytest.mark.usefixtures("runtime_directory")
def test_workers_of_two_hosts_call_each_other(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ARPC_SECRET", "known on both")
    monkeypatch.setenv("ARPC_SHARED_MEMORY_BYTES", "0")  # they are processes of one machine all the same
    with two_hosts() as hosts:
        store = f"tcp://{hosts[0].address}:{STORE_PORT}"
        commands = [[FAR_WORKER, str(rank), host.address, store, str(64 * MIB)] for rank, host in enumerate(hosts)]
        left, right = run_scripts(*commands, within=[host.runner for host in hosts])
    assert (left.returncode, right.returncode) == (0, 0)
    assert f"talked over tcp://{hosts[1].address}:" in left.stdout
    assert f"talked over tcp://{hosts[0].address}:" in right.stdout
