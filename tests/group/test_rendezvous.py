"""Both kinds of groups, over the stores that processes really share."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from arpc.errors import NameTakenError, RendezvousError, RendezvousTimeoutError
from arpc.group.elastic_group import ElasticRendezvous
from arpc.group.membership import MIXED_TEXT
from arpc.group.rendezvous import Rendezvous, WorkerRecord, create_rendezvous, open_store
from arpc.group.static_group import StaticRendezvous
from arpc.ids import WorkerInfo
from tests.agent.groups import Crew, crew, recorder, store_threads, until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def address() -> str:
    """Of a store that is not there yet."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


async def form(team: Crew, size: int, **where: Any) -> list[Rendezvous]:
    joining = (team.join(f"w{rank}", rank=rank, world_size=size, **where) for rank in range(size))
    return list(await asyncio.gather(*joining))


def test_a_record_is_plain_data():
    record = recorder("a")(3)
    assert record.info == WorkerInfo("a", 3)
    assert WorkerRecord("a", 3, record.incarnation, ("memory://a",), "machine", "script") == record
    with pytest.raises(AttributeError):
        record.name = "b"  # type: ignore[misc]


async def test_the_kind_of_group_follows_from_its_size():
    store = HashStore()
    for size, kind in ((1, StaticRendezvous), (None, ElasticRendezvous)):
        rendezvous = create_rendezvous(await open_store(store=store, rank=0, world_size=size))
        assert type(rendezvous) is kind
        await rendezvous.aclose()
    assert not store_threads()


# -- the two kinds do not mix -----------------------------------------------------------------------------------------


async def test_a_static_worker_that_waits_and_an_elastic_one_both_hear_that_they_do_not_mix():
    store = HashStore()
    async with crew() as team:
        static = asyncio.create_task(team.join("a", rank=0, world_size=2, store=store))
        await until(lambda: store.check(["arpc/static/0/start/value/0"]))
        with pytest.raises(RendezvousError, match=MIXED_TEXT):
            await team.join("b", world_size=None, store=store)
        with pytest.raises(RendezvousError, match=MIXED_TEXT):
            await static
        assert store.get("arpc/present/static") == store.get("arpc/present/elastic") == b"0"


async def test_an_elastic_group_hears_of_a_static_worker_and_lives_on():
    store = HashStore()
    async with crew() as team:
        elastic = await team.join("a", world_size=None, store=store)
        with pytest.raises(RendezvousError, match=MIXED_TEXT):
            await team.join("b", rank=0, world_size=1, store=store)
        with pytest.raises(RendezvousError, match=MIXED_TEXT):
            await anext(elastic.changes())
        other = await team.join("c", world_size=None, store=store)
        assert await elastic.members() == (elastic.record, other.record)


async def test_a_complete_static_group_is_not_disturbed_by_an_elastic_worker():
    store = HashStore()
    async with crew() as team:
        (static,) = await form(team, 1, store=store)
        with pytest.raises(RendezvousError, match=MIXED_TEXT):
            await team.join("b", world_size=None, store=store)
        assert await static.gather("end", b"", timeout_s=10) == {0: b""}


async def test_both_at_the_same_moment():
    for _ in range(20):
        store = HashStore()
        async with crew() as team:
            found = await asyncio.gather(
                team.join("a", rank=0, world_size=2, store=store),
                team.join("b", world_size=None, store=store),
                return_exceptions=True,
            )
            assert str(found[0]) == MIXED_TEXT
            if isinstance(found[1], Rendezvous):  # it had joined before the other came
                with pytest.raises(RendezvousError, match=MIXED_TEXT):
                    await anext(found[1].changes())
            else:
                assert str(found[1]) == MIXED_TEXT


async def test_one_kind_may_follow_the_other():
    store = HashStore()
    async with crew() as team:
        group = await form(team, 2, store=store)
        await asyncio.gather(*(worker.leave() for worker in group))
        elastic = await team.join("a", world_size=None, store=store)
        await elastic.leave()
        group = await form(team, 2, store=store)
        assert group[0].statistics()["generation"] == 1


# -- a store that one of the workers serves ---------------------------------------------------------------------------


async def test_the_host_of_the_store_leaves_last(address):
    async with crew() as team:
        host, *others = await form(team, 3, init_method=address)
        leaving = asyncio.create_task(host.leave(grace_s=30))
        done, _ = await asyncio.wait((leaving,), timeout=0.1)
        assert not done
        await others[0].leave()
        assert (await others[1].members())[0] == host.record
        assert not leaving.done()
        await others[1].leave()
        await leaving


async def test_the_host_does_not_wait_for_ever(address):
    async with crew() as team:
        host, *_ = await form(team, 2, init_method=address)
        loop = asyncio.get_running_loop()
        started = loop.time()
        await host.leave(grace_s=0.1)
        assert 0.1 <= loop.time() - started < 30


async def test_the_host_of_an_elastic_group_leaves_last(address):
    async with crew() as team:
        host = await team.join("host", init_method=address, world_size=None)
        other = await team.join("other", init_method=address, world_size=None)
        assert host.statistics()["store_host"] == 1
        leaving = asyncio.create_task(host.leave(grace_s=30))
        done, _ = await asyncio.wait((leaving,), timeout=0.1)
        assert not done
        assert [member.name for member in await other.members()] == ["other"]
        await other.leave()
        await leaving


async def test_all_hear_why_a_group_did_not_form_before_its_host_is_gone(address):
    async def start(rendezvous: Rendezvous, name: str) -> None:
        try:
            await rendezvous.join(name, recorder(name))
        finally:
            await rendezvous.aclose()

    async with crew() as team:
        ranks = await asyncio.gather(
            *(team.rendezvous(init_method=address, rank=rank, world_size=4) for rank in range(3))
        )
        tasks = [asyncio.create_task(start(ranks[1], "other"))]
        # nobody waits for one that has not come yet
        while await ranks[2]._store.run(lambda store: store.peek("static/0/start/value/1")) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        tasks += [asyncio.create_task(start(ranks[rank], "same")) for rank in (0, 2)]
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in errors] == [NameTakenError] * 3


@pytest.mark.parametrize("outlives", [False, True], ids=["store-ends-with-the-group", "store-outlives-the-group"])
async def test_again_and_again_at_the_same_address(address, outlives):
    async def worker(rank: int) -> list[int]:
        incarnations = []
        for _ in range(4):
            rendezvous = create_rendezvous(await open_store(init_method=address, rank=rank, world_size=3))
            await rendezvous.join(f"w{rank}", recorder(f"w{rank}"), timeout_s=30)
            await rendezvous.gather("shutdown", b"", timeout_s=30)
            incarnations.append(sum(member.incarnation for member in await rendezvous.members()))
            await rendezvous.leave()
            await rendezvous.aclose()
        return incarnations

    port = int(address.rpartition(":")[2])
    # as a process group has it, which was started with env:// in the process of rank 0
    server = (
        TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True) if outlives else None
    )
    # A fast worker finds the store of the group before, whose host is about to leave with it.
    seen = await asyncio.gather(*(worker(rank) for rank in range(3)))
    assert seen[0] == seen[1] == seen[2]
    assert not store_threads()
    del server


async def test_who_is_one_group_ahead_leaves_the_old_store_before_its_host_does(address):
    async with crew() as team:
        slow, fast = await form(team, 2, init_method=address)
        await fast.leave()
        await fast.aclose()
        ahead = asyncio.create_task(team.join("w1", init_method=address, rank=1, world_size=2))
        await slow._store.poll(lambda kv: kv.peek("static/1/start/value/1"), deadline=float("inf"))
        await slow.leave(grace_s=30)
        await slow.aclose()
        again = await team.join("w0", init_method=address, rank=0, world_size=2)
        assert (await again.resolve("w1")) == (await ahead).record


async def test_a_store_that_goes_away_is_told():
    async with crew() as team:
        host = await team.join("host", init_method="tcp://127.0.0.1:0", rank=0, world_size=None)
        address = str(host.statistics()["store"])
        other = await team.join("other", init_method=address, rank=1, world_size=None)
        await host.aclose()
        with pytest.raises(RendezvousError, match=rf"the store {address} was lost .*has its host, rank 0, ended"):
            await other.resolve("host")
        with pytest.raises(RendezvousError, match="was lost"):
            await other.leave()


# -- processes --------------------------------------------------------------------------------------------------------

PROGRAM = """
import asyncio, json, sys
from arpc.group.rendezvous import create_rendezvous, open_store
from tests.agent.groups import recorder

async def main(name, options):
    rendezvous = create_rendezvous(await open_store(**options))
    try:
        await rendezvous.join(name, recorder(name), timeout_s=40)
        members = [member.name for member in await rendezvous.members()]
        gathered = await rendezvous.gather("end", name.encode(), timeout_s=40)
        print(json.dumps([members, sorted(value.decode() for value in gathered.values())]), flush=True)
        if sys.stdin.read():
            return
        await rendezvous.leave()
    finally:
        await rendezvous.aclose()

asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
"""


def start(name: str, environment: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM, name, json.dumps(options)],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


async def first_line(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdout is not None
    return json.loads(await asyncio.to_thread(process.stdout.readline))


@pytest.mark.parametrize("scheme", ["env", "file"])
async def test_a_group_of_processes(scheme, address, tmp_path):
    host, port = address.removeprefix("tcp://").split(":")
    processes = []
    for rank in range(2):
        if scheme == "env":
            environment = {"MASTER_ADDR": host, "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": "2"}
            processes.append(start(f"w{rank}", environment))
        else:
            processes.append(start(f"w{rank}", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2))
    ends = await asyncio.gather(*(asyncio.to_thread(process.communicate) for process in processes))
    for process, (stdout, stderr) in zip(processes, ends, strict=True):
        assert process.returncode == 0, stderr.decode()
        assert json.loads(stdout) == [["w0", "w1"], ["w0", "w1"]]
        assert stderr == b"", "torch has nothing to complain about"


async def test_the_name_of_a_killed_process_is_taken_by_its_successor(address):
    async with crew() as team:
        witness = await team.join("witness", init_method=address, rank=0, world_size=None)
        process = start("worker", init_method=address, rank=1, world_size=None)
        assert (await first_line(process))[0] == ["witness", "worker"]
        killed = await witness.resolve("worker")
        process.kill()
        await asyncio.to_thread(process.communicate)
        assert (await witness.resolve("worker")) == killed, "nobody has noticed yet"

        async def probe(record: WorkerRecord) -> bool:
            return record.incarnation != killed.incarnation

        successor = await team.join("worker", init_method=address, rank=1, world_size=None, probe=probe)
        assert (await witness.resolve("worker")) == successor.record
        assert successor.record.id != killed.id


async def test_a_stopped_host_is_not_waited_for_when_joining_is_cancelled(address):
    process = start("host", init_method=address, rank=0, world_size=None)
    await first_line(process)
    async with crew() as team:
        rendezvous = await team.rendezvous(init_method=address, rank=1, world_size=None)
        process.send_signal(signal.SIGSTOP)
        try:
            started = time.monotonic()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await rendezvous.join("other", recorder("other"))
            assert time.monotonic() - started < 10
            assert rendezvous.statistics()["store_lost"] == 1
        finally:
            process.send_signal(signal.SIGCONT)
        await rendezvous.aclose()
    await asyncio.to_thread(process.communicate, b"end")
    assert process.returncode == 0


async def test_a_rank_that_never_comes(address):
    async with crew() as team:
        with pytest.raises(RendezvousTimeoutError, match="rank 1; there are 'a'"):
            await team.join("a", init_method=address, rank=0, world_size=2, timeout_s=0.1)
