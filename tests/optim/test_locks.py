"""Sets of parameters that are had by one at a time."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import suppress

import pytest
import torch
from torch import Tensor

import arpc
from arpc.agent.scope import WorkerScope, current_scope
from arpc.optim.locks import ParameterLocks, run_alone
from arpc.runtime import current
from arpc.testing import cluster


class Holder:
    """A task that holds some parameters until it is let go."""

    def __init__(self, locks: ParameterLocks, *parameters: Tensor) -> None:
        self.has_it = False
        self._release = asyncio.Event()
        self._task = asyncio.create_task(self._hold(locks, parameters))

    async def _hold(self, locks: ParameterLocks, parameters: tuple[Tensor, ...]) -> None:
        async with locks.hold(parameters):
            self.has_it = True
            await self._release.wait()

    async def let_go(self) -> None:
        self._release.set()
        await self._task

    async def cancel(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def locks():
    made = ParameterLocks()
    yield made
    assert made.is_idle


A, B, C = (torch.zeros(1) for _ in range(3))


async def test_sets_that_overlap_wait_and_others_do_not(locks):
    first, second, other = Holder(locks, A, B), Holder(locks, B, C), Holder(locks, torch.zeros(1))
    await turns()
    assert (first.has_it, second.has_it, other.has_it) == (True, False, True)
    await first.let_go()
    await turns()
    assert second.has_it
    await second.let_go()
    await other.let_go()


async def test_nobody_overtakes_those_who_wait_for_the_same(locks):
    first, wide, last = Holder(locks, A), Holder(locks, A, B), Holder(locks, B)
    await turns()
    assert not last.has_it  # B is free, but promised
    await first.let_go()
    await turns()
    assert wide.has_it
    await wide.let_go()
    await turns()
    assert last.has_it
    await last.let_go()


async def test_who_gives_up_waiting_makes_way(locks):
    first, wide, last = Holder(locks, A), Holder(locks, A, B), Holder(locks, B)
    await turns()
    await wide.cancel()
    await turns()
    assert last.has_it
    await last.let_go()
    await first.let_go()


async def test_cancelled_in_the_turn_in_which_it_is_granted(locks):
    async with locks.hold([A]):
        second, third = Holder(locks, A), Holder(locks, A)
        await turns()
    # granted to the second now, which has not run since
    await second.cancel()
    await turns()
    assert (second.has_it, third.has_it) == (False, True)
    await third.let_go()


@pytest.mark.parametrize("seed", range(5))
async def test_any_sets_in_any_order_end(locks, seed):
    dice = random.Random(seed)
    parameters = [torch.zeros(1) for _ in range(6)]
    in_use: set[int] = set()

    async def use() -> None:
        for _ in range(10):
            wanted = dice.sample(parameters, dice.randint(1, 4))
            ids = set(map(id, wanted))
            with suppress(TimeoutError):
                async with asyncio.timeout(0 if dice.random() < 0.2 else None), locks.hold(wanted):
                    assert not ids & in_use
                    in_use.update(ids)
                    try:
                        await asyncio.sleep(0)
                    finally:
                        in_use.difference_update(ids)

    await asyncio.gather(*(use() for _ in range(8)))


class Work:
    """Something in a thread that ends when it is told to."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.has_ended = False

    def __call__(self) -> str:
        self.begun.set()
        assert self.go_on.wait(40)
        self.has_ended = True
        return threading.current_thread().name


async def test_work_that_has_begun_is_finished_whatever_happens_to_who_waits():
    async with cluster(1):
        work, after = Work(), Work()
        after.go_on.set()
        task = asyncio.create_task(run_alone([A], work))
        await asyncio.to_thread(work.begun.wait, 20)
        task.cancel()
        await turns()
        task.cancel()
        await turns()
        assert not task.done()
        following = asyncio.create_task(run_alone([A], after))
        await turns()
        assert not after.begun.is_set()
        work.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert work.has_ended
        assert "arpc-" in await following
        assert current().keep(ParameterLocks).is_idle


async def test_work_that_has_not_begun_is_left():
    async with cluster(1):
        work, waiting = Work(), Work()
        task = asyncio.create_task(run_alone([A], work))
        await asyncio.to_thread(work.begun.wait, 20)
        other = asyncio.create_task(run_alone([A], waiting))
        await turns()
        other.cancel()
        with pytest.raises(asyncio.CancelledError):
            await other
        work.go_on.set()
        await task
        assert not waiting.begun.is_set()
        assert current().keep(ParameterLocks).is_idle


async def test_errors_of_the_work_are_raised():
    async with cluster(1):

        def fail() -> None:
            raise ZeroDivisionError("in a thread")

        with pytest.raises(ZeroDivisionError, match="in a thread"):
            await run_alone([A], fail)
        assert current().keep(ParameterLocks).is_idle


async def test_each_worker_keeps_its_own():
    async with cluster(2) as group:
        assert group[0].keep(ParameterLocks) is group[0].keep(ParameterLocks)
        assert group[0].keep(ParameterLocks) is not group[1].keep(ParameterLocks)
    with pytest.raises(arpc.NotInitializedError):
        await run_alone([A], Work())


async def test_a_worker_that_was_shut_down_runs_nothing():
    async with cluster(1) as group:
        pass
    work = Work()
    before = current_scope.set(WorkerScope(group[0]))
    try:
        with pytest.raises(arpc.ShutdownError, match="'worker0' has been shut down"):
            await run_alone([A], work)
    finally:
        current_scope.reset(before)
    assert not work.begun.is_set()
    assert group[0].keep(ParameterLocks).is_idle
