from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

from arpc.errors import RendezvousError
from arpc.group import group_store
from arpc.group.group_store import Access, GroupStore, KeyValues, StoreThread
from tests.agent.groups import store_threads


def wrap(store: Store) -> GroupStore:
    return GroupStore(KeyValues(store, Access("the store")), rank=None, world_size=None)


@pytest.fixture(params=["hash", "file", "tcp", "prefix"])
def store(request, tmp_path) -> Store:
    match request.param:
        case "hash":
            return HashStore()
        case "file":
            return FileStore(str(tmp_path / "store"))
        case "tcp":
            return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        case _:
            return PrefixStore("others", HashStore())


async def test_a_thread_that_cannot_be_started_is_started_later(monkeypatch: pytest.MonkeyPatch):
    thread = StoreThread()
    start = threading.Thread.start

    def refuse(_: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", start)
        raise RuntimeError("can't start new thread")

    done: list[int] = []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RendezvousError, match="start new thread"):
        await thread.run(lambda: done.append(1), limit_s=None)
    await thread.run(lambda: done.append(2), limit_s=None)
    assert done == [2]
    await thread.aclose()


async def test_without_a_thread_a_store_is_closed_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    thread = StoreThread()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    await thread.aclose()
    assert "at interpreter shutdown" in caplog.text
    with pytest.raises(RendezvousError, match="is closed"):
        await thread.run(lambda: None, limit_s=None)


def test_a_peek_never_waits_and_never_writes(store):
    kv = KeyValues(store, Access(""))
    assert kv.peek("key") is None
    assert kv.count("key") == 0
    kv.set("key", b"\x00\xff")
    assert kv.peek("key") == b"\x00\xff"
    assert not store.check(["arpc/other"])
    assert store.get("arpc/key") == b"\x00\xff"


def test_a_swap_happens_only_if_the_value_is_the_expected_one(store):
    kv = KeyValues(store, Access(""))
    assert kv.swap("key", b"first") == b"first"
    assert kv.swap("key", b"second") == b"first"
    assert kv.swap("key", b"second", expected=b"first") == b"second"
    assert kv.swap("key", b"third", expected=b"first") == b"second"
    assert kv.peek("key") == b"second"


def test_counters_and_many_values_at_once(store):
    kv = KeyValues(store, Access(""))
    assert kv.add("counter", 2) == 2
    assert kv.add("counter", -1) == 1
    assert kv.count("counter") == 1
    kv.set("a", b"1")
    kv.set("b", b"2")
    assert kv.fetch(["b", "a"]) == [b"2", b"1"]
    assert kv.fetch([]) == []
    assert kv.operations == 6


async def test_work_is_done_in_order_in_one_thread():
    group = wrap(HashStore())
    names: list[str] = []
    await asyncio.gather(*(group.run(lambda _: names.append(threading.current_thread().name)) for _ in range(5)))
    assert names == ["arpc-store"] * 5
    assert await group.run(lambda kv: kv.add("n", 1)) == 1
    await group.aclose()


async def test_what_was_handed_in_is_done_even_if_its_caller_is_cancelled():
    group = wrap(HashStore())
    gate = threading.Event()
    blocker = asyncio.create_task(group.run(lambda _: gate.wait()))
    cancelled = asyncio.create_task(group.run(lambda kv: kv.set("done", b"1")))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    gate.set()
    await blocker
    assert await group.run(lambda kv: kv.peek("done")) == b"1"
    await group.aclose()


async def test_closing_ends_the_thread_and_lets_go_of_the_store():
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = server.port
    group = wrap(server)
    del server
    await group.run(lambda kv: kv.set("a", b"1"))
    assert store_threads()
    await group.aclose()
    await group.aclose()
    assert not store_threads()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    with pytest.raises(RendezvousError, match="closed"):
        await group.run(lambda kv: kv.peek("a"))


async def test_the_thread_ends_with_a_store_that_nobody_closed():
    group = wrap(HashStore())
    await group.run(lambda kv: kv.add("n", 1))
    (thread,) = store_threads()
    del group
    gc.collect()
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive()


async def test_a_failing_store_counts_as_lost_and_is_asked_no_more():
    class Failing(Store):
        asked = 0

        def add(self, key: str, amount: int) -> int:
            self.asked += 1
            raise ConnectionError("the cable was pulled\nand more")

    store = Failing()
    group = wrap(store)
    with pytest.raises(RendezvousError, match=r"was lost in add\(\): the cable was pulled \(") as told:
        await group.run(lambda kv: kv.add("n", 1))
    assert isinstance(told.value.__cause__, ConnectionError)
    assert group.is_lost
    with pytest.raises(RendezvousError, match="closed, or was lost"):
        await group.run(lambda kv: kv.add("n", 1))
    assert store.asked == 1
    await group.aclose()


async def test_a_store_that_does_not_answer_counts_as_lost(monkeypatch, caplog):
    monkeypatch.setattr(group_store, "OPERATION_LIMIT_S", 0.05)
    monkeypatch.setattr(group_store, "CLOSE_LIMIT_S", 0.05)
    group = wrap(HashStore())
    gate = threading.Event()
    with pytest.raises(RendezvousError, match=r"has not answered for 0\.05 s"):
        await group.run(lambda _: gate.wait())
    (thread,) = store_threads()
    assert group.is_lost
    await group.aclose()
    assert "its thread stays behind" in caplog.text
    gate.set()
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive(), "it ends as soon as the call comes back"


async def test_a_step_on_a_lost_store_that_ends_late_does_not_lose_the_next_one():
    gate = threading.Event()
    following = KeyValues(HashStore(), Access("the next store"))

    async def reopen(_: float) -> KeyValues:
        return following

    first = KeyValues(HashStore(), Access("the store"))
    group = GroupStore(first, rank=None, world_size=None, reopen=reopen)
    reopening = asyncio.create_task(group.reopen(float("inf")))
    await asyncio.sleep(0)
    late = asyncio.create_task(group.run(lambda _: gate.wait(60), limit_s=0.2))
    assert await reopening
    with pytest.raises(RendezvousError, match="the store the store has not answered"):
        await late
    gate.set()
    assert not group.is_lost
    assert await group.run(lambda kv: kv.peek("anything")) is None
    await group.aclose()


async def test_an_error_of_the_work_itself_is_raised_as_it_is():
    group = wrap(HashStore())
    with pytest.raises(ZeroDivisionError):
        await group.run(lambda _: 1 // 0)
    assert not group.is_lost
    await group.aclose()


async def test_poll_looks_until_there_is_something():
    group = wrap(HashStore())
    looks = 0

    def look(kv: KeyValues) -> str | None:
        nonlocal looks
        looks += 1
        return "found" if looks == 5 else None

    assert await group.poll(look, deadline=float("inf")) == "found"
    assert looks == 5
    loop = asyncio.get_running_loop()
    assert await group.poll(lambda _: None, deadline=loop.time() + 0.02) is None
    assert group.statistics()["store_polls"] > 5
    await group.aclose()


async def test_poll_rests_longer_and_longer():
    group = wrap(HashStore())
    loop = asyncio.get_running_loop()
    looks: list[float] = []

    def look(_: KeyValues) -> Any:
        looks.append(loop.time())

    await group.poll(look, deadline=loop.time() + 0.5)
    # 1 ms, times 1.5, to 50 ms: 10 looks to get there, then 20 a second
    assert 5 < len(looks) < 25
    await group.aclose()


async def test_a_loop_that_is_gone_does_not_disturb_the_thread():
    thread = StoreThread()

    def from_another_loop() -> None:
        async def submit_and_go() -> None:
            thread.submit_nowait(lambda: gate.wait(30))

        asyncio.run(submit_and_go())

    gate = threading.Event()
    await asyncio.to_thread(from_another_loop)
    gate.set()
    assert await thread.run(lambda: "alive", limit_s=10) == "alive"
    await thread.aclose(lambda: None)


async def test_a_thread_that_has_nothing_to_do_ends_and_another_takes_its_place(monkeypatch):
    monkeypatch.setattr("arpc.group.group_store.IDLE_S", 0.001)
    thread = StoreThread()
    served_by: set[threading.Thread] = set()
    for _ in range(3):
        served_by.add(await thread.run(threading.current_thread, limit_s=10))
        while any(one.is_alive() for one in served_by):  # noqa: ASYNC110 - it waits for threads
            await asyncio.sleep(0.001)
    assert len(served_by) == 3
    order = [thread.submit_nowait(lambda number=number: number) for number in range(100)]
    assert await asyncio.gather(*order) == list(range(100))
    await thread.aclose()
    assert not any(one.name == "arpc-store" and one not in served_by for one in threading.enumerate())
