"""Tensors through shared memory between processes, some of which are killed, stopped, or cannot see each other."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import msgspec
import pytest
import torch

import arpc
from arpc.transport.shm import mapping
from tests.integration import functions
from tests.integration.processes import QUICK, Processes, impatience

pytestmark = pytest.mark.skipif(not mapping.is_supported(), reason="only Linux has files in memory without a name")

MIB = 1 << 20


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in another process
            await asyncio.sleep(0.005)


def lent_blocks(worker: arpc.Worker) -> int:
    blocks: int = worker.statistics()["shared_memory"]["used_blocks"]
    return blocks


def left_behind() -> set[str]:
    """What has a name in shared memory; torch's own workers may have some."""
    return {path.name for path in Path("/dev/shm").iterdir() if "arpc" in path.name}


async def test_there_and_back(processes: Processes):
    async with processes.group("other", main=functions.serve) as worker:
        storage = torch.randn(2048, 1024)
        values = {
            "plain": torch.arange(MIB),
            "permuted": storage.t(),
            "views": [storage[:1000], storage[500:1500]],
            "partial": storage[:, 3:900],
            "bfloat16": torch.randn(MIB).bfloat16(),
            "numpy": storage.numpy() * 2,
            "small": torch.ones(3),
            "grad": torch.randn(MIB, requires_grad=True),
        }
        back = await worker.rpc_sync("other", functions.echo, args=(values,))
        assert back.keys() == values.keys()
        for name in ("plain", "permuted", "partial", "bfloat16", "small", "grad"):
            assert torch.equal(back[name], values[name]), name
        assert (back["numpy"] == values["numpy"]).all()
        assert back["grad"].requires_grad
        first, second = back["views"]
        first[500:] += 1
        assert torch.equal(second[:500], storage[500:1000] + 1), "they share their memory, and can be written to"
        assert worker.statistics()["shared_memory"]["sends"] == 1
        del back, first, second
        assert await worker.rpc_sync("other", functions.echo, args=(1,)) == 1
        await until(lambda: lent_blocks(worker) == 0)


async def test_a_killed_receiver_leaves_nothing(processes: Processes):
    async with processes.group("victim", main=functions.serve) as worker:
        for number in range(4):
            await worker.rpc_sync("victim", functions.keep, args=(torch.full((MIB,), float(number)),))
        assert lent_blocks(worker) == 4
        assert worker.statistics()["shared_memory"]["lent_bytes"] == {"victim": 16 * MIB}
        under_way = worker.rpc_async("victim", functions.keep, args=(torch.ones(32 * MIB),))
        processes["victim"].kill()
        with pytest.raises(arpc.WorkerLostError):
            await under_way
        await until(lambda: lent_blocks(worker) == 0)
        assert worker.statistics()["shared_memory"]["lent_bytes"] == {}
        assert left_behind() == set()


async def test_what_a_killed_sender_sent_stays(processes: Processes):
    async with processes.group("victim", main=functions.serve) as worker:
        functions.kept.clear()
        await worker.rpc_sync("victim", functions.send_and_keep, args=("test", 3))
        assert worker.statistics()["shared_memory"]["borrowed_bytes"] == 12 * MIB
        processes["victim"].kill()
        await processes["victim"].ended()
        del functions.kept[1]
        assert [float(tensor.mean()) for tensor in functions.kept] == [0.0, 2.0]
        functions.kept[0].add_(5)
        assert float(functions.kept[0].sum()) == 5 * MIB
        functions.kept.clear()
        await until(lambda: worker.statistics()["shared_memory"]["mapped_arenas"] == 0)
        assert left_behind() == set()


async def test_a_receiver_that_is_stopped_keeps_what_it_has(processes: Processes):
    async with processes.group("sleepy", main=functions.serve) as worker:
        await worker.rpc_sync("sleepy", functions.keep, args=(torch.full((MIB,), 3.0),))
        processes["sleepy"].signal(signal.SIGSTOP)
        with impatience(worker), pytest.raises(arpc.WorkerLostError, match="not been heard of"):
            await worker.rpc_sync("sleepy", functions.keep, args=(torch.full((MIB,), 4.0),), timeout=0)
        assert lent_blocks(worker) == 2, "it may still look at them"
        processes["sleepy"].signal(signal.SIGCONT)
        await until(lambda: worker.agent.known_peer("sleepy").connection is None)
        assert await worker.rpc_sync("sleepy", functions.total_kept) in {3.0 * MIB, 7.0 * MIB}
        await worker.rpc_sync("sleepy", functions.keep, args=(torch.full((MIB,), 5.0),))
        assert await worker.rpc_sync("sleepy", functions.total_kept) in {8.0 * MIB, 12.0 * MIB}
        await worker.rpc_sync("sleepy", functions.forget)
        await until(lambda: lent_blocks(worker) == 0)


async def test_a_full_arena(processes: Processes):
    options = QUICK.replace(shared_memory_bytes=10 * MIB)
    async with processes.group("other", main=functions.serve, options=options) as worker:
        for number in range(5):
            await worker.rpc_sync("other", functions.keep, args=(torch.full((MIB,), float(number)),))
        assert await worker.rpc_sync("other", functions.total_kept) == 10.0 * MIB
        statistics = worker.statistics()["shared_memory"]
        assert (statistics["sends"], statistics["fallbacks"]) == (2, 3)


@pytest.mark.parametrize("who", ["nobody shares", "another namespace"])
async def test_those_who_do_not_share(processes: Processes, who: str):
    options = QUICK.replace(shared_memory_bytes=0) if who == "nobody shares" else QUICK
    async with processes.group("other", main=functions.serve, options=options) as worker:
        if worker.arena is not None:
            # the other looks for a process of that number, and finds somebody else
            worker.arena.file.offer = msgspec.structs.replace(worker.arena.file.offer, pid=1)
        value = torch.randn(MIB)
        assert torch.equal(await worker.rpc_sync("other", functions.echo, args=(value,)), value)
        assert worker.statistics()["shared_memory"].get("sends", 0) == 0


async def test_a_shared_tensor_is_one_tensor(processes: Processes):
    async with processes.group("first", "second", main=functions.serve) as worker:
        tensor = worker.shared(torch.zeros(4, MIB))
        assert tensor.shape == (4, MIB)
        await worker.rpc_sync("first", functions.keep, args=(tensor,))
        await worker.rpc_sync("second", functions.fill, args=(tensor[1:3], 2.0))
        assert tensor.mean(1).tolist() == [0, 2, 2, 0]
        assert await worker.rpc_sync("first", functions.total_kept) == 4.0 * MIB
        tensor[0] = 1
        assert await worker.rpc_sync("first", functions.total_kept) == 5.0 * MIB
        statistics = worker.statistics()["shared_memory"]
        assert (statistics["used_blocks"], statistics["lent_bytes"]) == (1, {"first": 16 * MIB})
        del tensor
        assert await worker.rpc_sync("first", functions.total_kept) == 5.0 * MIB
        assert lent_blocks(worker) == 1
        await worker.rpc_sync("first", functions.forget)
        await until(lambda: lent_blocks(worker) == 0)
