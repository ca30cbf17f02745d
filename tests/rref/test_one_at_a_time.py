from __future__ import annotations

import asyncio
import threading

import pytest

import arpc
from arpc.rref.one_at_a_time import MethodQueues
from arpc.testing import Cluster


class Base:
    def __init__(self) -> None:
        self.total = 0
        self.order: list[int] = []
        self.running = 0
        self.most_running = 0
        self.may_end = threading.Event()
        self.has_begun = threading.Event()

    def add(self, number: int) -> int:
        """Loses what others add meanwhile."""
        self._enter()
        total = self.total
        threading.Event().wait(0.001)  # lets another thread run, if there is one
        self.total = total + number
        self.order.append(number)
        self._leave()
        return self.total

    async def add_later(self, number: int) -> int:
        self._enter()
        total = self.total
        for _ in range(3):
            await asyncio.sleep(0)
        self.total = total + number
        self.order.append(number)
        self._leave()
        return self.total

    def _enter(self) -> None:
        self.running += 1
        self.most_running = max(self.most_running, self.running)

    def _leave(self) -> None:
        self.running -= 1

    def fail(self) -> None:
        raise ValueError("no")

    async def fail_later(self) -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    async def wait_for_ever(self) -> None:
        await asyncio.Event().wait()

    def hold(self) -> None:
        self._enter()
        self.has_begun.set()
        self.may_end.wait(30)
        self._leave()

    def let_go(self) -> None:
        self.may_end.set()

    def numbers(self, count: int):
        yield from range(count)


@arpc.one_at_a_time
class Account(Base):
    pass


class Special(Account):
    pass


class OneMethod(Base):
    @arpc.one_at_a_time
    def add(self, number: int) -> int:
        return super().add(number)


def is_idle(worker: arpc.Worker) -> bool:
    return worker.keep(MethodQueues).is_idle


@pytest.mark.parametrize("method", ["add", "add_later"])
@pytest.mark.parametrize("made", [Account, Special])
async def test_no_call_meets_another_and_all_run_in_order(group: Cluster, made: type[Base], method: str) -> None:
    account = Account() if made is Account else Special()
    rref = arpc.RRef(account)
    futures = [getattr(rref.rpc_async(), method)(number) for number in range(1, 33)]
    assert await asyncio.gather(*futures) == [number * (number + 1) // 2 for number in range(1, 33)]
    assert account.order == list(range(1, 33))
    assert account.most_running == 1
    assert is_idle(group[0])


async def test_callers_on_several_workers_use_one_queue(group: Cluster) -> None:
    account = Account()
    first, second = arpc.RRef(account), arpc.RRef(account)
    await asyncio.gather(*(rref.rpc_sync().add(1) for rref in [first, second] * 8))
    assert account.total == 16
    made = arpc.remote("worker1", Account)
    others = [arpc.rpc_async("worker2", add_to, (made, 1)) for _ in range(8)]
    await asyncio.gather(*others, *(made.rpc_async().add_later(1) for _ in range(8)))
    assert (await made.rpc_sync().add(0)) == 16
    assert is_idle(group[1])


async def add_to(account: arpc.RRef[Account], number: int) -> int:
    result: int = await account.rpc_sync().add(number)
    return result


@pytest.mark.parametrize("method", ["fail", "fail_later"])
async def test_a_failure_makes_way_for_the_next(group: Cluster, method: str) -> None:
    rref = arpc.remote("worker1", Account)
    failed = getattr(rref.rpc_async(), method)()
    assert await rref.rpc_sync().add(1) == 1
    with pytest.raises(ValueError, match="no"):
        await failed
    assert is_idle(group[1])


async def test_a_cancelled_coroutine_makes_way_for_the_next(group: Cluster) -> None:
    rref = arpc.remote("worker1", Account)
    stuck = rref.rpc_async().wait_for_ever()
    waits = rref.rpc_async().add(100)
    behind = rref.rpc_async().add(1)
    waits.cancel()
    stuck.cancel()
    assert await behind == 1
    assert is_idle(group[1])


async def test_a_thread_whose_caller_is_gone_keeps_its_turn(group: Cluster) -> None:
    account = Account()
    rref = arpc.RRef(account)
    holds = rref.rpc_async().hold()
    assert await asyncio.to_thread(account.has_begun.wait, 30)
    behind = rref.rpc_async().add(1)
    holds.cancel()
    await arpc.rpc_sync("worker0", arpc.get_worker_info)  # the cancellation has arrived
    assert not behind.done()
    account.may_end.set()
    assert await behind == 1
    assert account.most_running == 1
    assert is_idle(group[0])


async def test_a_marked_method_waits_for_marked_methods_alone(group: Cluster) -> None:
    one = OneMethod()
    rref = arpc.RRef(one)
    held = rref.rpc_async().hold()  # is not marked, and so holds nothing up
    await asyncio.gather(*(rref.rpc_async().add(1) for _ in range(16)))
    assert one.total == 16
    await rref.rpc_sync().let_go()
    await held


async def test_results_can_stay_where_they_are(group: Cluster) -> None:
    rref = arpc.remote("worker1", Account)
    assert await rref.remote().add(2) == 2


async def test_streams_take_no_turn(group: Cluster) -> None:
    account = Account()
    rref = arpc.RRef(account)
    held = rref.rpc_async().hold()
    assert await asyncio.to_thread(account.has_begun.wait, 30)
    assert [number async for number in rref.stream().numbers(3)] == [0, 1, 2]
    account.may_end.set()
    await held


def yields():
    yield 1


@pytest.mark.parametrize(
    ("target", "text"), [(yields, "yields"), (3, "not for a int"), (staticmethod(len), "staticmethod")]
)
def test_what_cannot_be_marked(target: object, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        arpc.one_at_a_time(target)


def test_a_call_in_the_same_process_is_a_plain_call() -> None:
    assert Account().add(3) == 3
