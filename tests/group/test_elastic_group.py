from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from torch.distributed import HashStore

from arpc.errors import NameTakenError, RendezvousError, UnknownWorkerError
from arpc.group import elastic_group
from arpc.group.elastic_group import (
    ElasticPresence,
    ElasticRendezvous,
    allocate_id,
    append_event,
    mark_used,
    read_events,
)
from arpc.group.group_store import Access, GroupStore, KeyValues
from arpc.group.membership import encode
from arpc.group.rendezvous import Joined, Left, Rendezvous, WorkerRecord
from arpc.ids import WorkerInfo
from tests.agent.groups import CountingStore, Crew, crew, recorder, store_threads, until


async def join(team: Crew, name: str, store: Any, probe: Any = None, rank: int | None = None) -> Rendezvous:
    return await team.join(name, store=store, world_size=None, probe=probe, rank=rank)


async def names(worker: Rendezvous) -> list[str]:
    return [member.name for member in await worker.members()]


def among(*living: Rendezvous) -> Any:
    """A probe that knows who lives."""
    incarnations = {worker.record.incarnation for worker in living}

    async def probe(record: WorkerRecord) -> bool:
        return record.incarnation in incarnations

    return probe


# -- coming and going -------------------------------------------------------------------------------------------------


async def test_workers_come_and_go():
    store = HashStore()
    async with crew() as team:
        a = await join(team, "a", store)
        assert a.is_elastic
        assert await names(a) == ["a"]
        b = await join(team, "b", store)
        c = await join(team, "c", store)
        assert await names(a) == await names(b) == await names(c) == ["a", "b", "c"]
        await b.leave()
        assert await names(a) == await names(c) == ["a", "c"]
        assert (await c.resolve("a")) == (await c.resolve(0)) == a.record
        assert c.statistics()["members"] == 2
        assert c.statistics()["group"] == "elastic"
        for gone in ("b", 1):
            with pytest.raises(UnknownWorkerError, match=r"there are 'a' \(id 0\), 'c' \(id 2\)"):
                await a.resolve(gone)


async def test_a_name_is_free_again_and_an_id_is_not():
    store = HashStore()
    async with crew() as team:
        a = await join(team, "a", store)
        for worker_id in range(1, 4):
            b = await join(team, "b", store)
            assert b.record.info == WorkerInfo("b", worker_id)
            assert (await a.resolve("b")) == b.record
            await b.leave()
            await b.leave()
        assert await names(a) == ["a"]


async def test_a_rank_is_a_wish_for_that_id():
    store = HashStore()
    async with crew() as team:
        assert (await join(team, "a", store, rank=2)).record.id == 2
        others = [await join(team, name, store) for name in "bcd"]
        assert [other.record.id for other in others] == [0, 1, 3]
        assert (await join(team, "e", store, rank=3)).record.id == 4


async def test_ids_run_out():
    store = HashStore()
    store.set("arpc/elastic/next_id", "65535")
    async with crew() as team:
        assert (await join(team, "a", store)).record.id == 65535
        with pytest.raises(RendezvousError, match="all 65536 worker ids of this group were used"):
            await join(team, "b", store)
        assert store.get("arpc/present/elastic") == b"1"


async def test_many_at_once_are_all_there(tmp_path):
    async with crew() as team:
        where = {"init_method": f"file://{tmp_path}/store", "world_size": None}
        group = await asyncio.gather(*(team.join(f"w{number}", **where) for number in range(16)))
        tables = [await worker.members() for worker in group]
        assert all(table == tables[0] for table in tables)
        assert [member.id for member in tables[0]] == list(range(16))
        await asyncio.gather(*(worker.leave() for worker in group[1:]))
        assert await names(group[0]) == [group[0].record.name]


async def test_the_price_of_joining_does_not_grow_with_the_group():
    store = CountingStore()
    async with crew() as team:
        prices = []
        for number in range(30):
            before = store.counts.total() - store.counts["values in multi_get"]
            await join(team, f"w{number}", store)
            prices.append(store.counts.total() - store.counts["values in multi_get"] - before)
        assert max(prices) < 30
        assert len(set(prices[2:])) == 1


async def test_there_is_nobody_to_wait_for():
    store = HashStore()
    async with crew() as team:
        await join(team, "a", store)
        b = await join(team, "b", store)
        assert await b.gather("shutdown", b"value", timeout_s=1) == {1: b"value"}


# -- names ------------------------------------------------------------------------------------------------------------


async def test_the_name_of_a_living_worker_is_taken():
    store = HashStore()
    async with crew() as team:
        a = await join(team, "a", store)
        for probe in (None, among(a)):
            with pytest.raises(NameTakenError, match=r"the name 'a' is taken: worker 'a' \(id 0\) has it"):
                await join(team, "a", store, probe)
        assert (await a.resolve("a")) == a.record
        assert store.get("arpc/present/elastic") == b"1"


async def test_the_name_of_a_dead_worker_can_be_taken():
    store = HashStore()
    async with crew() as team:
        witness = await join(team, "witness", store)
        crashed = await join(team, "a", store)
        await crashed.aclose()  # without leaving
        successor = await join(team, "a", store, among(witness))
        assert successor.record.incarnation != crashed.record.incarnation
        assert (await witness.resolve("a")) == successor.record
        assert await names(witness) == ["witness", "a"]
        with pytest.raises(UnknownWorkerError):
            await witness.resolve(crashed.record.id)
        assert store.get("arpc/present/elastic") == b"2"


async def test_a_worker_that_was_taken_for_dead_does_no_harm_when_it_leaves():
    store = HashStore()
    async with crew() as team:
        old = await join(team, "a", store)
        new = await join(team, "a", store, among())
        changes = old.changes(interval_s=0.01)
        assert await anext(changes) == Left(old.record)
        assert await anext(changes) == Joined(new.record)
        await changes.aclose()
        await old.leave()
        assert (await new.resolve("a")) == new.record
        assert store.get("arpc/present/elastic") == b"1"


async def test_of_two_who_come_for_the_name_of_a_dead_worker_one_gets_it():
    store = HashStore()
    async with crew() as team:
        crashed = await join(team, "a", store)
        await crashed.aclose()
        both_asked = asyncio.Barrier(2)

        async def probe(record: WorkerRecord) -> bool:
            if record.incarnation != crashed.record.incarnation:
                return True
            await both_asked.wait()
            return False

        found = await asyncio.gather(
            join(team, "a", store, probe), join(team, "a", store, probe), return_exceptions=True
        )
        winner, loser = sorted(found, key=lambda one: isinstance(one, Exception))
        assert isinstance(winner, Rendezvous)
        assert isinstance(loser, NameTakenError)
        assert await winner.members() == (winner.record,)
        assert store.get("arpc/present/elastic") == b"1"


async def test_a_name_that_becomes_free_while_its_holder_is_probed():
    store = HashStore()
    async with crew() as team:
        a = await join(team, "a", store)

        async def leaves_meanwhile(record: WorkerRecord) -> bool:
            await a.leave()
            return False

        successor = await join(team, "a", store, leaves_meanwhile)
        assert await successor.members() == (successor.record,)
        assert store.get("arpc/present/elastic") == b"1"


async def test_a_worker_that_died_between_its_name_and_its_entry():
    store = HashStore()
    store.set("arpc/elastic/name/a", encode(recorder("a")(7)))
    async with crew() as team:
        successor = await join(team, "a", store, among())
        assert await successor.members() == (successor.record,)


# -- changes ----------------------------------------------------------------------------------------------------------


async def test_changes_since_joining():
    store = HashStore()
    async with crew() as team:
        await join(team, "before", store)
        watcher = await join(team, "watcher", store)
        a = await join(team, "a", store)  # before anyone looks
        changes = watcher.changes(interval_s=0.001)
        assert await anext(changes) == Joined(a.record)
        await a.leave()
        assert await anext(changes) == Left(a.record)
        coming = asyncio.ensure_future(anext(changes))
        b = await join(team, "b", store)
        assert await coming == Joined(b.record)
        await changes.aclose()


async def test_looking_for_changes_costs_two_operations():
    store = CountingStore()
    async with crew() as team:
        watcher = await join(team, "watcher", store)
        before = store.counts.copy()

        async def watch() -> None:
            async for _ in watcher.changes(interval_s=0):
                pytest.fail("nothing happens")

        watching = asyncio.create_task(watch())
        await until(lambda: store.counts["peek"] >= before["peek"] + 20)
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
        await watcher.aclose()
        spent = store.counts - before
        assert spent.keys() == {"peek"}
        assert spent["peek"] % 2 == 0


async def test_changes_end_when_the_worker_leaves():
    async with crew() as team:
        worker = await join(team, "a", HashStore())

        async def watch() -> list[Joined | Left]:
            return [change async for change in worker.changes(interval_s=0.01)]

        watching = asyncio.create_task(watch())
        await asyncio.sleep(0)
        await worker.leave()
        await worker.aclose()
        assert await watching in ([], [Left(worker.record)])


def test_the_log_has_no_gaps_and_is_read_in_large_pieces(monkeypatch):
    monkeypatch.setattr(elastic_group, "EVENTS_AT_ONCE", 10)
    store = CountingStore()
    kv = KeyValues(store, Access(""))
    events = [Joined(recorder(f"w{number}")(number)) for number in range(35)]
    for place, event in enumerate(events):
        assert append_event(kv, event) == place
    assert read_events(kv, 0) == events
    assert read_events(kv, 30) == events[30:]
    store.counts.clear()
    assert read_events(kv, 35) == []
    assert store.counts.total() == 1
    kv.set("elastic/tail", b"3")  # a slow writer may put it back
    assert append_event(kv, Left(events[0].record)) == 35
    assert read_events(kv, 34) == [events[34], Left(events[0].record)]


async def test_callers_that_read_the_log_at_once_do_not_disturb_each_other():
    store = HashStore()
    async with crew() as team:
        watcher = await join(team, "watcher", store)
        for round_ in range(5):
            worker = await join(team, "a", store)
            found = await asyncio.gather(*(watcher.resolve("a") for _ in range(10)), watcher.members())
            assert found[:10] == [worker.record] * 10
            await worker.leave()
            assert watcher.statistics()["events"] == 2 * (round_ + 1)
            await watcher.members()


# -- cancellation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", range(0, 60, 4))
async def test_cancelled_at_any_step_nothing_is_left(turns):
    store = HashStore()
    async with crew() as team:
        rendezvous = await team.rendezvous(store=store, world_size=None)
        joining = asyncio.create_task(rendezvous.join("a", recorder("a")))
        for _ in range(turns):
            await asyncio.sleep(0)
        joining.cancel()
        try:
            await joining
        except asyncio.CancelledError:
            pass
        else:
            await rendezvous.leave()  # it was faster
        await rendezvous.aclose()
        assert not store_threads()
        successor = await join(team, "a", store)
        assert await successor.members() == (successor.record,)
        assert store.get("arpc/present/elastic") == b"1"


async def test_cancelled_in_a_probe():
    store = HashStore()
    async with crew() as team:
        a = await join(team, "a", store)
        probing = asyncio.Event()

        async def probe(record: WorkerRecord) -> bool:
            probing.set()
            await asyncio.Event().wait()
            return False

        joining = asyncio.create_task(join(team, "a", store, probe))
        await probing.wait()
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining
        assert await a.members() == (a.record,)
        assert store.get("arpc/present/elastic") == b"1"


async def test_a_join_that_is_cancelled_at_the_next_store_uncounts_nobody_there():
    opening, opened = threading.Event(), threading.Event()

    class Losing:
        """A store that is lost as soon as a worker was counted in it."""

        def __init__(self) -> None:
            self._store = HashStore()
            self._is_lost = False

        def __getattr__(self, name: str) -> Any:
            def call(*args: Any) -> Any:
                if self._is_lost:
                    raise RuntimeError("the connection is gone")
                self._is_lost = name == "add" and "present/elastic" in args[0]
                return getattr(self._store, name)(*args)

            return call

    class Opening(KeyValues):
        def is_closing(self) -> bool:
            opening.set()
            assert opened.wait(30)
            return super().is_closing()

    second = Opening(HashStore(), Access("the next store"))

    async def reopen(_: float) -> KeyValues:
        return second

    store = GroupStore(KeyValues(Losing(), Access("the store")), rank=None, world_size=None, reopen=reopen)
    joining = asyncio.create_task(ElasticRendezvous(store).join("a", recorder("a")))
    await asyncio.to_thread(opening.wait, 30)
    joining.cancel()
    opened.set()
    with pytest.raises(asyncio.CancelledError):
        await joining
    assert second.count("present/elastic") == 0
    await store.aclose()


# -- a store that is made anew -----------------------------------------------------------------------------------------


def key_values() -> KeyValues:
    return KeyValues(HashStore(), Access("a store"))


def record_of(name: str, worker_id: int) -> WorkerRecord:
    return recorder(name)(worker_id)


def restored(kv: KeyValues, record: WorkerRecord, *known: WorkerRecord) -> list[Joined | Left]:
    used = sum({1 << one.id for one in (record, *known)})
    return ElasticPresence().restore(kv, record, known, used)


def test_one_who_returns_brings_back_all_it_knows():
    kv = key_values()
    a, b, c = (record_of(name, worker_id) for worker_id, name in enumerate("abc"))
    assert restored(kv, a, a, b) == [Joined(a), Joined(b)]
    assert restored(kv, b, a, b, c) == [Joined(a), Joined(b), Joined(c)]
    assert restored(kv, b, a, b, c) == [Joined(a), Joined(b), Joined(c)], "twice is as good as once"
    assert ElasticPresence().take_name(kv, record_of("c", 7), None) == encode(c), "its name is not free"
    assert kv.count("present/elastic") == 3


def test_a_worker_that_two_others_restore_at_the_same_time_is_counted_once():
    a, b, c = (record_of(name, worker_id) for worker_id, name in enumerate("abc"))

    class Racing(KeyValues):
        """Lets `b` restore the group in the middle of its being restored by `a`."""

        other: KeyValues | None

        def swap(self, key: str, value: bytes, *, expected: bytes = b"") -> bytes:
            other = self.other
            if other is not None and key == "elastic/name/c":
                self.other = None
                restored(other, b, a, b, c)
            return super().swap(key, value, expected=expected)

    store = HashStore()
    kv = Racing(store, Access("a store"))
    kv.other = KeyValues(store, Access("a store"))
    assert {event.record.name for event in restored(kv, a, a, b, c)} == {"a", "b", "c"}
    assert kv.other is None, "the other worker has restored the group meanwhile"
    assert kv.count("present/elastic") == 3


def test_names_and_ids_that_were_given_meanwhile_stay_given():
    kv = key_values()
    newcomers = [record_of("a", allocate_id(kv, None)), record_of("n", allocate_id(kv, None))]
    for newcomer in newcomers:
        assert isinstance(ElasticPresence().take_name(kv, newcomer, None), int)
    joined = [Joined(newcomer) for newcomer in newcomers]
    late, other, third = record_of("a", 5), record_of("b", newcomers[1].id), record_of("c", 6)
    assert restored(kv, late, late, other, third) == [*joined, Joined(third)]
    assert restored(kv, other, late, other, third) == [*joined, Joined(third)]


def test_one_who_was_replaced_leaves_nothing_of_its_successor():
    kv = key_values()
    late, successor = record_of("a", 5), record_of("a", 0)
    ElasticPresence().take_name(kv, successor, None)
    presence = ElasticPresence()
    presence.restore(kv, late, (), 1 << 5)
    presence.leave(kv)
    assert read_events(kv, 0) == [Joined(successor)]
    assert kv.peek("elastic/name/a") == encode(successor)


def test_no_id_of_an_earlier_store_is_given_out():
    kv = key_values()
    mark_used(kv, 0b1011)
    mark_used(kv, 0b0011)
    mark_used(kv, 1 << 9)
    assert kv.peek("elastic/used") == bytes([0b1011, 0b10])
    assert allocate_id(kv, 2) == 2
    assert allocate_id(kv, 2) not in {0, 1, 2, 3, 9}
    assert allocate_id(kv, 3) not in {0, 1, 2, 3, 9}


def test_ids_run_out_in_a_later_store_too():
    kv = key_values()
    mark_used(kv, (1 << 65536) - 1 - (1 << 40_000))
    assert allocate_id(kv, None) == 40_000
    with pytest.raises(RendezvousError, match="all 65536 worker ids of this group were used"):
        allocate_id(kv, None)
