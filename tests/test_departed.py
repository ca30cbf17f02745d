"""Workers that left an elastic group are forgotten in the end: whoever stays keeps nothing for each of them."""

from __future__ import annotations

import asyncio
import gc
import types
from collections import OrderedDict, deque
from collections.abc import Iterator
from logging import Logger

import pytest

import arpc
from arpc.group import roster
from arpc.testing import Cluster, cluster
from tests.agent.leftovers import until

REMEMBERED = 4
OPTIONS = arpc.RpcOptions(gc_freeze=False, rpc_timeout=5.0, control_backoff=0.01)


@pytest.fixture(autouse=True)
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "REMEMBERED", REMEMBERED)
    monkeypatch.setattr(roster, "REMEMBERED_S", 0.0)


def add(a: int, b: int) -> int:
    return a + b


def make() -> list[int]:
    return [1]


async def call_back(name: str) -> int:
    return await arpc.rpc_sync(name, add, args=(1, 2))


async def read(rref: arpc.RRef) -> list[int]:
    return await rref.to_here()


kept: list[arpc.RRef] = []


async def keep(rref: arpc.RRef) -> None:
    kept.append(rref)


async def come_and_go(group: Cluster, name: str, *, says_goodbye: bool) -> None:
    """Be called, call, own a value and use one, and leave."""
    stay = group[0]
    worker = await group.add(name)
    assert await stay.rpc_sync(name, add, args=(1, 2)) == 3
    assert await stay.rpc_sync(name, call_back, args=(stay.name,)) == 3
    theirs = stay.remote(name, make)
    assert await theirs.to_here() == [1]
    ours = arpc.RRef([1])
    assert await stay.rpc_sync(name, read, args=(ours,)) == [1]
    del ours, theirs
    await worker.shutdown(graceful=says_goodbye)
    group._workers.remove(worker)
    # in the place of the time that passes before one is forgotten
    await until(lambda: name not in {info.name for info in stay.get_worker_infos()} and stay.rref_context.post.is_idle)


def sizes(root: object) -> dict[int, tuple[str, int]]:
    """How much is in each container that an object leads to, with a description of it."""
    others = (
        types.ModuleType,
        types.FunctionType,
        type,
        types.FrameType,
        types.CodeType,
        asyncio.AbstractEventLoop,
        Logger,
    )
    seen = {id(root)}
    found: dict[int, tuple[str, int]] = {}
    ahead: list[tuple[object, str]] = [(root, "")]
    while ahead:
        one, path = ahead.pop()
        if isinstance(one, dict | list | set | deque | OrderedDict):
            found[id(one)] = (path, len(one))
        for other, name in _led_to(one):
            if id(other) not in seen and not isinstance(other, others):
                seen.add(id(other))
                ahead.append((other, f"{path[-200:]}{name}"))
    return found


def _led_to(one: object) -> Iterator[tuple[object, str]]:
    named = one if isinstance(one, dict) else getattr(one, "__dict__", {})
    for key, value in list(named.items()):
        yield value, f".{str(key)[:40]}"
    for other in gc.get_referents(one):
        yield other, f".{type(other).__name__}"


async def test_nothing_is_kept_for_each_of_them():
    async with cluster(["stay"], options=OPTIONS, elastic=True) as group:
        stay = group[0]
        for number in range(3 * REMEMBERED):
            await come_and_go(group, f"first{number}", says_goodbye=number % 2 == 0)
        before = sizes(stay)
        for number in range(3 * REMEMBERED):
            await come_and_go(group, f"second{number}", says_goodbye=number % 2 == 0)

        def grown() -> set[str]:
            gc.collect()
            return {
                path
                for key, (path, size) in sizes(stay).items()
                if key in before and size >= before[key][1] + 2 * REMEMBERED
            }

        # What is kept for some time, such as until the deadline of a call, goes. Ids, which nobody has again, stay.
        for _ in range(200):
            if grown() <= {".rref_context.forks._lost"}:
                break
            await asyncio.sleep(0.1)
        assert grown() <= {".rref_context.forks._lost"}
        names = {peer.info.name for peer in stay.agent.peers}
        assert len(names) <= 1 + REMEMBERED
        assert "first0" not in names


async def test_errors_say_that_a_worker_left_as_long_as_that_is_known():
    async with cluster(["stay"], options=OPTIONS, elastic=True) as group:
        stay = group[0]
        await come_and_go(group, "a", says_goodbye=True)
        with pytest.raises(arpc.WorkerLostError, match="'a' has left"):
            await stay.rpc_sync("a", add, args=(1, 2))
        for number in range(REMEMBERED):
            await come_and_go(group, f"other{number}", says_goodbye=True)
        with pytest.raises(arpc.UnknownWorkerError, match="no worker named 'a' in the group"):
            await stay.rpc_sync("a", add, args=(1, 2))
        await group.add("a")
        assert await stay.rpc_sync("a", add, args=(1, 2)) == 3


async def test_references_to_a_forgotten_owner_are_lost():
    async with cluster(["stay"], options=OPTIONS, elastic=True) as group:
        stay = group[0]
        worker = await group.add("owner")
        theirs = stay.remote("owner", make)
        await theirs.to_here()
        await worker.shutdown(graceful=False)
        group._workers.remove(worker)
        for number in range(2 * REMEMBERED):
            await come_and_go(group, f"other{number}", says_goodbye=True)
        assert stay.agent.peer("owner") is None
        with pytest.raises(arpc.OwnerLostError, match="owner"):
            await theirs.to_here()
        del theirs
        gc.collect()
        await until(lambda: not stay.rrefs())


async def test_a_value_that_a_forgotten_worker_held_is_dropped():
    async with cluster(["stay"], options=OPTIONS, elastic=True) as group:
        stay = group[0]
        worker = await group.add("holder")
        ours = arpc.RRef([1])
        await stay.rpc_sync("holder", keep, args=(ours,))
        await worker.shutdown(graceful=False)
        group._workers.remove(worker)
        kept.clear()
        for number in range(2 * REMEMBERED):
            await come_and_go(group, f"other{number}", says_goodbye=True)
        del ours
        gc.collect()
        await until(lambda: not stay.rrefs())


async def test_a_worker_that_was_cut_off_is_known_again():
    """It is the same worker, which remembers what it has been told: nothing it is told now may look old to it."""
    async with cluster(["stay"], options=OPTIONS, elastic=True) as group:
        stay = group[0]
        other = await group.add("other")
        for _ in range(3):
            theirs = stay.remote("other", make)
            await theirs.to_here()
            del theirs
        gc.collect()
        await until(lambda: not other.rrefs())
        info = stay.get_worker_info("other")
        peer = stay.agent.known_peer("other")
        assert peer.connection is not None
        peer.connection.abort()
        await until(lambda: peer.connection is None)
        assert stay.agent.forget(info)
        assert stay.agent.peer("other") is None
        theirs = stay.remote("other", make)
        assert await theirs.to_here() == [1]
        assert len(other.rrefs()) == 1
        del theirs
        gc.collect()
        await until(lambda: not other.rrefs())


async def test_workers_of_a_group_of_fixed_size_are_not_forgotten():
    async with cluster(2 + REMEMBERED) as group:
        first, *others = group
        for worker in others:
            await first.rpc_sync(worker.name, add, args=(1, 2))
            await worker.shutdown(graceful=False)
        for worker in others:
            await until(lambda worker=worker: first.agent.known_peer(worker.name).connection is None)
            with pytest.raises(arpc.WorkerLostError, match="has left"):
                await first.rpc_sync(worker.name, add, args=(1, 2))
        await first.shutdown(graceful=False)
