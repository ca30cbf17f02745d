"""Workers that only a network connects, and what large tensors cost them in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration import functions
from tests.integration.namespaces import two_hosts
from tests.integration.processes import QUICK, Processes, run_scripts

MIB = 1 << 20
FAR_WORKER = str(Path(__file__).parent / "scripts" / "far_worker.py")
DEMO = str(Path(__file__).parents[2] / "examples" / "parameter_server.py")
UNPLUGGED_WORKER = str(Path(__file__).parent / "scripts" / "unplugged_worker.py")
STORE_PORT = 29500  # in a namespace of its own every port is free


async def test_a_large_tensor_is_copied_on_neither_side(processes: Processes):
    options = QUICK.replace(listen=("tcp://127.0.0.1:0",), shared_memory_bytes=0)
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


@pytest.mark.timeout(160)  # three processes import torch
@pytest.mark.usefixtures("runtime_directory")
def test_the_demo_runs_over_two_hosts_with_tls_as_slurm_would_start_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing but what ``srun`` sets says who is who and where to meet."""
    certs = pytest.importorskip("arpc.certs", reason="this arpc makes no certificates")
    pytest.importorskip("cryptography", reason="certificates are made with cryptography")
    made = certs.Authority(tmp_path).issue("worker*")
    for name, value in (("CERT", made.cert), ("KEY", made.key), ("CA", made.ca)):
        monkeypatch.setenv(f"ARPC_TLS_{name}", str(value))
    monkeypatch.setenv("ARPC_SHARED_MEMORY_BYTES", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with two_hosts() as hosts:
        left, right = (host.runner for host in hosts)
        job = ["SLURM_JOB_ID=4242", "SLURM_STEP_ID=0", "SLURM_NTASKS=3", "SLURM_JOB_NODELIST=10.213.77.[1-2]"]
        tasks = [[*there, "env", *job, f"SLURM_PROCID={rank}"] for rank, there in enumerate((left, right, right))]
        driver, server, trainer = run_scripts(*[[DEMO, "--steps", "20"]] * 3, limit_s=150.0, within=tasks)
    # without TLS, and with no secret, they would have refused to listen beyond their hosts
    assert [one.returncode for one in (driver, server, trainer)] == [0, 0, 0]
    assert "    20 gradients   loss " in driver.stdout


@pytest.mark.usefixtures("runtime_directory")
def test_an_unplugged_network_is_noticed_and_survived(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ARPC_SECRET", "known on both")
    with two_hosts() as hosts:
        # met on the host whose cable is pulled, so that its store is always near
        store = f"tcp://{hosts[0].address}:{STORE_PORT}"
        commands = [[UNPLUGGED_WORKER, str(rank), host.address, store] for rank, host in enumerate(hosts)]
        left, right = run_scripts(*commands, within=[host.runner for host in hosts])
    assert (left.returncode, right.returncode) == (0, 0)
    told = [line for line in left.stdout.splitlines() if not line.startswith("[")]  # torch has its say too
    assert told[0].startswith("lost right True after")
    assert told[1:] == ["MemberSuspected", "went out", "MemberReturned", "kept"]
