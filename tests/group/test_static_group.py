from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest
from torch.distributed import HashStore

from arpc.errors import (
    ConfigurationError,
    NameTakenError,
    RendezvousError,
    RendezvousTimeoutError,
    UnknownWorkerError,
)
from arpc.group import static_group
from arpc.group import store_allgather as rounds
from arpc.group.rendezvous import Rendezvous, WorkerRecord
from arpc.group.static_group import ranges
from arpc.ids import WorkerInfo
from tests.agent.groups import CountingStore, Crew, crew, recorder, store_threads, until


async def form(team: Crew, size: int, **where: Any) -> list[Rendezvous]:
    """A whole group, workers w0, w1 and so on."""
    joining = (team.join(f"w{rank}", rank=rank, world_size=size, **where) for rank in range(size))
    return list(await asyncio.gather(*joining))


async def errors_of(*joining: Any) -> list[BaseException]:
    found = await asyncio.gather(*joining, return_exceptions=True)
    assert all(isinstance(error, BaseException) for error in found), found
    return [error for error in found if isinstance(error, BaseException)]


async def alive(record: WorkerRecord) -> bool:
    return True


async def dead(record: WorkerRecord) -> bool:
    return False


# -- a group forms ----------------------------------------------------------------------------------------------------


async def test_everybody_knows_everybody():
    async with crew() as team:
        group = await form(team, 3, store=HashStore())
        tables = [await worker.members() for worker in group]
        assert tables[0] == tables[1] == tables[2]
        assert [member.info for member in tables[0]] == [WorkerInfo(f"w{rank}", rank) for rank in range(3)]
        assert tables[0][1].addresses == ("memory://w1",)
        assert [worker.record for worker in group] == list(tables[0])
        assert not group[0].is_elastic


async def test_workers_are_found_by_name_and_by_id():
    async with crew() as team:
        group = await form(team, 2, store=HashStore())
        assert (await group[0].resolve("w1")).id == 1
        assert (await group[0].resolve(1)).name == "w1"
        for stranger in ("w2", 2, -1):
            with pytest.raises(UnknownWorkerError, match=r"no worker .*; there are 'w0' \(id 0\), 'w1' \(id 1\)"):
                await group[0].resolve(stranger)


async def test_a_group_of_one():
    async with crew() as team:
        (worker,) = await form(team, 1, store=HashStore())
        assert await worker.gather("tag", b"value", timeout_s=10) == {0: b"value"}


async def test_through_a_file(tmp_path):
    async with crew() as team:
        group = await form(team, 4, init_method=f"file://{tmp_path}/store")
        assert len(await group[3].members()) == 4
        await asyncio.gather(*(worker.leave() for worker in group))
    assert not (tmp_path / "store").exists()


async def test_nobody_comes_or_goes():
    async with crew() as team:
        (worker,) = await form(team, 1, store=HashStore())
        assert [change async for change in worker.changes()] == []


async def test_statistics():
    async with crew() as team:
        group = await form(team, 2, store=HashStore())
        statistics = group[1].statistics()
        assert statistics["worker"] == "w1"
        assert statistics["group"] == "static"
        assert statistics["members"] == 2
        assert statistics["generation"] == 0
        assert statistics["store"] == "HashStore"
        assert int(statistics["store_operations"]) > 0


# -- at what price ----------------------------------------------------------------------------------------------------


async def price_of_a_group(size: int) -> Counter[str]:
    store = CountingStore()
    async with crew() as team:
        group = await form(team, size, store=store)
        await asyncio.gather(*(worker.gather("end", b"", timeout_s=30) for worker in group))
        await asyncio.gather(*(worker.leave() for worker in group))
    return store.counts


async def test_the_price_of_a_group_grows_with_its_size():
    small, large = await price_of_a_group(16), await price_of_a_group(64)
    for operation in ("set", "add", "compare_set", "values in multi_get"):
        assert large[operation] <= 4 * small[operation] + 4, operation
    assert large["multi_get"] == 2, "one worker collects for all: at the start, and in the barrier"
    assert large["values in multi_get"] == 2 * 64
    assert large["get"] == 0
    # A peek is a look whether it is time yet, so there are more of them if the machine is slow.
    assert large.total() - large["peek"] - large["values in multi_get"] < 64 * 100


async def test_when_many_lose_patience_one_finds_out_why(monkeypatch: pytest.MonkeyPatch):
    # The others trust the one who looks, however slow the machine is.
    monkeypatch.setattr(rounds, "REPORT_LIMIT_S", 30.0)
    store = CountingStore()
    size = 32
    async with crew() as team:
        joining = [
            asyncio.create_task(team.join(f"w{rank}", rank=rank, world_size=size, store=store))
            for rank in range(size - 1)
        ]
        await until(lambda: store.store.check([f"arpc/static/0/start/value/{rank}" for rank in range(size - 1)]))
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda now=loop.time: now() + 20.0)
        errors = await errors_of(*joining)
    assert {str(error) for error in errors} == {str(errors[0])}
    assert "1 of 32 workers are missing, rank 31;" in str(errors[0])
    # How often they look whether it is over depends on the machine; how many look for the one who is missing does not.
    (for_the_missing,) = (count for key, count in store.peeks.items() if key.endswith("/value/31"))
    assert for_the_missing < size / 2, "one in each period while they wait, one when they give up"


# -- a group does not form --------------------------------------------------------------------------------------------


async def test_a_name_that_is_there_twice_is_told_to_all():
    store = HashStore()
    names = ["trainer", "server", "trainer", "other"]
    async with crew() as team:
        errors = await errors_of(
            *(team.join(name, rank=rank, world_size=5, store=store) for rank, name in enumerate(names))
        )
    for error in errors:
        assert type(error) is NameTakenError
        assert str(error) in {
            "two workers have the name 'trainer': rank 0 and rank 2",
            "two workers have the name 'trainer': rank 2 and rank 0",
        }


async def test_a_rank_that_is_there_twice_is_told_to_all():
    store = HashStore()
    async with crew() as team:
        errors = await errors_of(
            team.join("a", rank=0, world_size=3, store=store),
            team.join("b", rank=1, world_size=3, store=store),
            team.join("c", rank=1, world_size=3, store=store),
        )
    for error in errors:
        assert type(error) is NameTakenError
        assert "rank 1 was given to two workers" in str(error)
        assert "'b'" in str(error)
        assert "'c'" in str(error)


async def test_who_comes_too_late_for_the_bad_news_hears_it_too():
    store = HashStore()
    async with crew() as team:
        await errors_of(*(team.join("same", rank=rank, world_size=3, store=store) for rank in range(2)))
        with pytest.raises(NameTakenError, match="two workers have the name 'same'"):
            await team.join("late", rank=2, world_size=3, store=store)


async def test_a_rank_of_a_complete_group_is_taken_and_the_group_lives_on():
    store = HashStore()
    async with crew() as team:
        group = await form(team, 2, store=store)
        with pytest.raises(NameTakenError, match="'w1' has it, 'thief' wants it too"):
            await team.join("thief", rank=1, world_size=2, store=store)
        gathered = await asyncio.gather(*(worker.gather("end", b"ok", timeout_s=10) for worker in group))
        assert gathered == [{0: b"ok", 1: b"ok"}] * 2
        await asyncio.gather(*(worker.leave() for worker in group))
        again = await form(team, 2, store=store)
        assert again[0].statistics()["generation"] == 1


async def test_sizes_that_differ_are_told_to_all():
    store = HashStore()
    async with crew() as team:
        errors = await errors_of(
            team.join("a", rank=0, world_size=2, store=store), team.join("b", rank=1, world_size=3, store=store)
        )
    for error in errors:
        assert type(error) is RendezvousError
        assert "has world_size=" in str(error)


async def test_who_is_missing_and_who_came():
    store = HashStore()
    async with crew() as team:
        patient = asyncio.create_task(team.join("w3", rank=3, world_size=6, store=store))
        await until(lambda: store.check(["arpc/static/0/start/value/3"]))
        errors = await errors_of(team.join("w0", rank=0, world_size=6, store=store, timeout_s=0.2), patient)
    for error in errors:
        assert type(error) is RendezvousTimeoutError
        assert str(error) == (
            "the group did not form within 0.2 s: 4 of 6 workers are missing, rank 1-2, 4-5; "
            "there are 'w0' (rank 0), 'w3' (rank 3)"
        )


async def test_the_start_is_completed_by_who_waits_if_the_last_to_come_dies_over_it():
    store = HashStore()
    async with crew() as team:
        waiting = [
            asyncio.create_task(team.join(f"w{rank}", rank=rank, world_size=3, store=store, timeout_s=0.3))
            for rank in range(2)
        ]
        record = recorder("w2")(2)
        store.set("arpc/static/0/start/value/2", static_group.encode(record))
        group = await asyncio.gather(*waiting)
        assert (await group[0].members())[2] == record


@pytest.mark.parametrize("name", ["", "a b", "ä", "x" * 128])
async def test_a_bad_name_fails_here_and_disturbs_nobody(name):
    store = HashStore()
    async with crew() as team:
        with pytest.raises(ConfigurationError, match="Worker name must match"):
            await team.join(name, rank=0, world_size=1, store=store)
        assert store.num_keys() == 0
        await form(team, 1, store=store)


async def test_a_record_that_says_something_else():
    async with crew() as team:
        rendezvous = await team.rendezvous(store=HashStore(), rank=0, world_size=1)
        with pytest.raises(ConfigurationError, match="the record of worker 'a'"):
            await rendezvous.join("a", recorder("b"))


async def test_a_rendezvous_is_joined_once():
    async with crew() as team:
        (worker,) = await form(team, 1, store=HashStore())
        with pytest.raises(RendezvousError, match="joined once"):
            await worker.join("w0", recorder("w0"))


async def test_nothing_works_before_joining():
    async with crew() as team:
        rendezvous = await team.rendezvous(store=HashStore(), rank=0, world_size=1)
        with pytest.raises(RendezvousError, match="has not joined"):
            await rendezvous.gather("tag", b"", timeout_s=1)
        with pytest.raises(RendezvousError, match="has not joined"):
            _ = rendezvous.record
        await rendezvous.leave()
        assert rendezvous.statistics()["members"] == 0


async def test_garbage_in_the_store():
    store = HashStore()
    store.set("arpc/static/0/start/outcome", b"\xffgarbage")
    async with crew() as team:
        with pytest.raises(RendezvousError, match="is another version of arpc using it"):
            await team.join("a", rank=0, world_size=1, store=store)


# -- cancellation -----------------------------------------------------------------------------------------------------


async def test_a_cancelled_worker_leaves_nothing_and_the_others_hear_of_it():
    store = HashStore()
    async with crew() as team:
        rendezvous = await team.rendezvous(rank=1, world_size=3, store=store)
        cancelled = asyncio.create_task(rendezvous.join("b", recorder("b")))
        waiting = asyncio.create_task(team.join("a", rank=0, world_size=3, store=store))
        await until(lambda: store.check(["arpc/static/0/start/value/0", "arpc/static/0/start/value/1"]))
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await rendezvous.aclose()
        with pytest.raises(RendezvousError, match=r"worker 'b' \(rank 1\) gave up before the group was complete"):
            await waiting
        assert store.get("arpc/present/static") == b"0"


@pytest.mark.parametrize("turns", range(0, 40, 3))
async def test_cancelled_at_any_step_the_next_group_forms(turns):
    store = HashStore()
    async with crew() as team:
        rendezvous = await team.rendezvous(rank=1, world_size=2, store=store)
        joining = asyncio.create_task(rendezvous.join("b", recorder("b")))
        for _ in range(turns):
            await asyncio.sleep(0)
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining
        await rendezvous.aclose()
        present = store.get("arpc/present/static") if store.check(["arpc/present/static"]) else b"0"
        assert present == b"0"
        if store.check(["arpc/static/0/start/outcome"]):
            with pytest.raises(RendezvousError, match="gave up"):  # it is news to rank 0
                await team.join("a", rank=0, world_size=2, store=store)
        group = await asyncio.gather(
            team.join("a", rank=0, world_size=2, store=store), team.join("b", rank=1, world_size=2, store=store)
        )
        assert len(await group[0].members()) == 2


async def test_cancelling_is_prompt():
    async with crew() as team:
        rendezvous = await team.rendezvous(rank=1, world_size=2, store=HashStore())
        joining = asyncio.create_task(rendezvous.join("b", recorder("b")))
        await asyncio.sleep(0.2)  # long enough for the pauses between two looks to have grown
        started = time.monotonic()
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining
        await rendezvous.aclose()
        assert time.monotonic() - started < 10
        assert not store_threads()


# -- one group after another ------------------------------------------------------------------------------------------


async def test_groups_follow_one_another_in_one_store():
    store = HashStore()
    async with crew() as team:
        for generation in range(3):
            group = await form(team, 3, store=store)
            assert {worker.statistics()["generation"] for worker in group} == {generation}
            gathered = await asyncio.gather(*(w.gather("end", b"%d" % generation, timeout_s=10) for w in group))
            assert gathered[0] == dict.fromkeys(range(3), b"%d" % generation)
            await asyncio.gather(*(worker.leave() for worker in group))


async def test_a_fast_worker_may_be_one_group_ahead():
    store = HashStore()
    async with crew() as team:
        fast, slow = await form(team, 2, store=store)
        await fast.leave()
        ahead = asyncio.create_task(team.join("w0", rank=0, world_size=2, store=store))
        assert (await slow.resolve("w0")).incarnation == fast.record.incarnation
        await slow.leave()
        behind = await team.join("w1", rank=1, world_size=2, store=store)
        assert (await behind.resolve("w0")) == (await ahead).record


async def test_after_a_failed_start_the_next_one_works():
    store = HashStore()
    async with crew() as team:
        await errors_of(*(team.join("same", rank=rank, world_size=2, store=store) for rank in range(2)))
        group = await form(team, 2, store=store)
        assert group[0].statistics()["generation"] == 1


async def test_an_old_failure_is_no_news(monkeypatch):
    store = HashStore()
    async with crew() as team:
        await errors_of(team.join("w0", rank=0, world_size=2, store=store, timeout_s=0.05))
        monkeypatch.setattr(static_group, "FAILURE_IS_NEWS_S", 0.0)
        group = await form(team, 2, store=store)
        assert {worker.statistics()["generation"] for worker in group} == {1}
        await asyncio.gather(*(worker.leave() for worker in group))
        assert store.get("arpc/static/ended/0") == store.get("arpc/static/ended/1") == b"2"


async def test_a_whole_group_that_was_killed_is_followed_by_the_next():
    store = HashStore()
    async with crew() as team:
        killed = await form(team, 2, store=store)
        with pytest.raises(NameTakenError, match=r"If 'w0' was killed, start the group with a fresh store or file"):
            await team.join("w0", rank=0, world_size=2, store=store, probe=alive)
        for worker in killed:
            await worker.aclose()  # without leaving
        group = await form(team, 2, store=store, probe=dead)
        assert {worker.statistics()["generation"] for worker in group} == {1}
        assert store.get("arpc/present/static") == b"2"
        await asyncio.gather(*(worker.leave() for worker in group))
        assert store.get("arpc/present/static") == b"0"


async def test_a_worker_killed_during_the_start_and_started_again():
    store = HashStore()
    async with crew() as team:
        waiting = asyncio.create_task(team.join("a", rank=0, world_size=3, store=store))
        store.set("arpc/static/0/start/value/1", static_group.encode(recorder("b")(1)))
        again = asyncio.create_task(team.join("b", rank=1, world_size=3, store=store, probe=dead))
        with pytest.raises(RendezvousError, match=r"worker 'b' \(rank 1\) died before the group was complete"):
            await waiting
        group = await asyncio.gather(
            team.join("a", rank=0, world_size=3, store=store), again, _join_after_news(team, store)
        )
        assert {worker.statistics()["generation"] for worker in group} == {1}


async def _join_after_news(team: Crew, store: HashStore) -> Rendezvous:
    with pytest.raises(RendezvousError, match="died"):
        await team.join("c", rank=2, world_size=3, store=store)
    return await team.join("c", rank=2, world_size=3, store=store)


async def test_a_probe_that_cannot_tell_counts_as_alive():
    async def never(record: WorkerRecord) -> bool:
        await asyncio.Event().wait()
        return False

    store = HashStore()
    async with crew() as team:
        await form(team, 1, store=store)
        with pytest.raises(NameTakenError):
            await team.join("w0", rank=0, world_size=1, store=store, probe=never, timeout_s=0.1)


# -- gather -----------------------------------------------------------------------------------------------------------


async def test_gather_brings_all_values_to_all():
    async with crew() as team:
        group = await form(team, 3, store=HashStore())
        for number in range(3):  # the same tag again and again
            values = [b"%d/%d" % (number, rank) for rank in range(3)]
            gathered = await asyncio.gather(
                *(worker.gather("tag", value, timeout_s=10) for worker, value in zip(group, values, strict=True))
            )
            assert gathered == [dict(enumerate(values))] * 3


async def test_gather_is_a_barrier():
    async with crew() as team:
        group = await form(team, 2, store=HashStore())
        first = asyncio.create_task(group[0].gather("barrier", b"", timeout_s=10))
        done, _ = await asyncio.wait((first,), timeout=0.1)
        assert not done
        await group[1].gather("barrier", b"", timeout_s=10)
        assert await first == {0: b"", 1: b""}


async def test_gather_names_who_did_not_come_to_all_who_did():
    async with crew() as team:
        group = await form(team, 4, store=HashStore())
        patient = asyncio.create_task(group[0].gather("shutdown", b"", timeout_s=30))
        errors = await errors_of(group[2].gather("shutdown", b"", timeout_s=0.2), patient)
        for error in errors:
            assert type(error) is RendezvousTimeoutError
            assert str(error) == ("shutdown: 2 of 4 workers did not come within 0.2 s: 'w1' (rank 1), 'w3' (rank 3)")
        with pytest.raises(RendezvousTimeoutError, match="did not come"):  # who comes later hears it too, at once
            await group[1].gather("shutdown", b"", timeout_s=30)
        gathered = await asyncio.gather(*(worker.gather("again", b"", timeout_s=10) for worker in group))
        assert len(gathered[0]) == 4


def test_ranges():
    assert ranges([]) == ""
    assert ranges([4]) == "4"
    assert ranges([0, 1, 3, 5, 6, 7]) == "0-1, 3, 5-7"
