"""Plain functions in threads: how many there are, what they may do, and what they find."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from contextvars import ContextVar, copy_context
from typing import Any

import pytest
import torch

import arpc
from arpc.agent.server.functions import Function
from arpc.agent.server.run import NO_CONTEXT, Run
from arpc.agent.server.thread_job import ThreadJob
from arpc.agent.server.thread_pool import Outbox, ThreadPool, _WakeUp
from arpc.testing import cluster
from tests.agent.leftovers import assert_nothing_left, until
from tests.agent.stage import call_on, call_on_in_thread, echo, echo_in_thread, hold_in_thread

variable: ContextVar[str] = ContextVar("variable", default="untouched")


# -- through calls


async def test_threads_are_started_when_they_are_needed(pair, stage):
    threads = pair[1].agent.dispatcher.threads
    assert threads.statistics()["threads"] == 0
    for _ in range(20):
        await pair[0].rpc_sync("worker1", echo_in_thread)
    assert threads.statistics()["threads"] == 1, "one is enough for one call at a time"
    futures = [pair[0].rpc_async("worker1", hold_in_thread, args=(str(number),)) for number in range(3)]
    await stage.wait_until("0 begun", "1 begun", "2 begun")
    assert threads.statistics()["threads"] == 3
    stage.open()
    await asyncio.gather(*futures)


async def test_there_are_sixteen_at_most(pair, stage):
    futures = [pair[0].rpc_async("worker1", hold_in_thread, args=(str(number),)) for number in range(40)]
    await stage.wait_until("15 begun")
    statistics = pair[1].agent.dispatcher.threads.statistics()
    assert statistics["threads"] == statistics["threads_max"] == 16
    assert statistics["jobs_unfinished"] == 40
    assert statistics["jobs_queued"] == 24
    # the loop is free meanwhile
    assert await pair[0].rpc_sync("worker1", echo, args=("free",)) == "free"
    stage.open()
    await asyncio.gather(*futures)


async def test_a_thread_makes_nested_calls(trio):
    args = ("worker2", call_on_in_thread, "worker0", call_on, "worker1", echo, "deep")
    assert await trio[0].rpc_sync("worker1", call_on_in_thread, args=args) == "deep"


async def test_a_thread_knows_its_worker_and_its_caller(pair):
    assert await pair[0].rpc_sync("worker1", who_am_i) == "worker1"


def who_am_i() -> str:
    return arpc.get_worker_info().name


async def test_a_blocking_wait_of_a_handler_on_the_loop_is_refused(pair):
    with pytest.raises(RuntimeError, match="would block the event loop"):
        await pair[0].rpc_sync("worker1", wait_on_the_loop)


async def wait_on_the_loop() -> None:
    future = arpc.rpc_async("worker0", echo)
    try:
        future.wait()
    finally:
        await future


async def test_no_context_variable_stays_behind_in_a_thread():
    options = arpc.RpcOptions(num_worker_threads=1, gc_freeze=False)
    async with cluster(2, options=options) as group:
        assert await group[0].rpc_sync("worker1", change_the_variable) == "untouched"
        assert await group[0].rpc_sync("worker1", change_the_variable) == "untouched"
        await assert_nothing_left(group)


def change_the_variable() -> str:
    before = variable.get()
    variable.set("changed")
    return before


async def test_no_grad_mode_stays_behind_in_a_thread():
    options = arpc.RpcOptions(num_worker_threads=1, gc_freeze=False)
    async with cluster(2, options=options) as group:
        assert await group[0].rpc_sync("worker1", switch_grad_off)
        assert await group[0].rpc_sync("worker1", switch_grad_off), "the thread was left with gradients off"
        await assert_nothing_left(group)


def switch_grad_off() -> bool:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    assert torch.empty(1).device.type == "meta"
    return before


async def test_a_slow_function_does_not_hold_up_the_others(pair, stage):
    slow = pair[0].rpc_async("worker1", hold_in_thread)
    await stage.wait_until("held begun")
    assert await asyncio.gather(*(pair[0].rpc_sync("worker1", echo_in_thread, args=(n,)) for n in range(50))) == [
        *range(50)
    ]
    assert not slow.done()
    stage.open()
    await slow


async def test_a_function_that_is_cancelled_as_it_begins_still_has_its_context(pair, stage, monkeypatch):
    """It may have looked just before the loop ended it; the context it would find then is everybody's."""
    (link,) = pair[1].agent.connector.links
    run = Run(pair[1].agent.dispatcher, link, Function(variable.get), 1, 0, copy_context())
    run.context.run(variable.set, "its own")

    def cancelled() -> float:
        run.ended = True
        run.context = NO_CONTEXT
        return 0.0

    monkeypatch.setattr("arpc.agent.server.thread_job._clock", cancelled)
    job = ThreadJob(run)
    assert job.work() is not None
    assert job.result == "its own"


# -- the pool itself


async def ended(pool: ThreadPool, timeout_s: float) -> bool:
    """Wait until the threads have ended; False if some are still busy."""
    deadline = time.monotonic() + timeout_s
    while any(thread.is_alive() for thread in pool._threads):
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(0.005)
    return True


@pytest.fixture
async def pool() -> AsyncIterator[ThreadPool]:
    pool = ThreadPool(asyncio.get_running_loop(), 2, "test")
    yield pool
    pool.close()
    assert await ended(pool, 5)


async def test_the_pool_calls_and_gives_back(pool):
    assert await pool.call(max, 1, 2) == 2
    assert await pool.call(threading.current_thread) is not threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        await pool.call(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await pool.call(next, iter(()))


async def test_results_come_in_batches(pool):
    """All that is ready when the loop looks comes with one wake-up."""
    started, release = threading.Event(), threading.Event()

    def block() -> None:
        started.set()
        release.wait(10)

    blocker = pool.call(block)
    await asyncio.to_thread(started.wait, 10)
    collected: list[int] = []
    wake_ups = 0
    collect = pool._collect

    def count() -> None:
        nonlocal wake_ups
        wake_ups += 1
        collect()

    pool._collect = count
    finished = threading.Event()
    for number in range(100):
        pool.submit(lambda number=number: lambda: collected.append(number))
    pool.submit(finished.set)
    pool._wake_threads()
    finished.wait(10)  # with the loop blocked, so that it cannot look in between
    release.set()
    await blocker
    assert collected == list(range(100))
    assert wake_ups < 10


async def test_a_cancelled_job_does_no_harm(pool):
    started, release = threading.Event(), threading.Event()

    def block() -> int:
        started.set()
        release.wait(10)
        return 1

    future = pool.call(block)
    await asyncio.to_thread(started.wait, 10)
    future.cancel()
    release.set()
    assert await pool.call(max, 1, 2) == 2


async def test_a_job_that_breaks_its_promise_costs_no_thread(pool, caplog):
    def job() -> Any:
        raise SystemExit(1)

    for _ in range(5):
        pool.submit(job)
    assert await pool.call(max, 1, 2) == 2
    assert all(thread.is_alive() for thread in pool._threads)
    assert "internal error in a worker thread" in caplog.text


async def test_a_closed_pool_finishes_what_it_has(pool):
    started, release = threading.Event(), threading.Event()

    def block() -> int:
        started.set()
        release.wait(10)
        return 1

    future = pool.call(block)
    await asyncio.to_thread(started.wait, 10)
    pool.close()
    assert not await ended(pool, 0.01)
    release.set()
    assert await future == 1


async def test_what_comes_after_the_end_is_done_too():
    for was_used in (False, True):
        pool = ThreadPool(asyncio.get_running_loop(), 2, "test")
        before = pool.call(max, 1, 2) if was_used else None
        pool.close()
        assert await pool.call(max, 3, 4) == 4
        assert before is None or await before == 2
        assert await ended(pool, 5)


async def test_what_comes_after_the_end_is_done_though_nobody_is_left_of_those_it_would_wait_for():
    pool = ThreadPool(asyncio.get_running_loop(), 1, "test")
    release, is_taken = threading.Event(), threading.Event()
    calls: list[asyncio.Future[Any]] = [pool.call(release.wait, 10)]
    await until(lambda: pool.is_in_slow_job)
    # all of this in one turn of the loop, at whose end somebody is to be woken for the first of them
    calls.append(pool.call(is_taken.set))
    release.set()
    assert is_taken.wait(10)
    pool.close()
    for thread in pool._threads:
        thread.join(10)
    calls.append(pool.call(max, 3, 4))
    async with asyncio.timeout(10):
        assert await asyncio.gather(*calls) == [True, None, 4]


async def test_no_thread_is_woken_while_all_are_busy():
    """A job may take hours: rings that nobody hears would pile up."""
    pool = ThreadPool(asyncio.get_running_loop(), 1, "test")
    started, release = threading.Event(), threading.Event()

    def block() -> None:
        started.set()
        release.wait(10)

    blocker = pool.call(block)
    await asyncio.to_thread(started.wait, 10)
    waiting = pool.call(max, 1, 2)
    pool._wake_threads()
    assert pool._helper is None or pool._helper.cancelled()
    release.set()
    await blocker
    assert await waiting == 2
    pool.close()
    assert await ended(pool, 5)


async def test_a_thread_that_cannot_be_started_is_not_counted_on(pool, monkeypatch):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    future = pool.call(max, 1, 2)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            pool._wake_threads()
    assert await future == 2


def test_a_pool_outlives_its_loop():
    """A job that ends after its loop does no harm."""
    release = threading.Event()

    async def main() -> ThreadPool:
        pool = ThreadPool(asyncio.get_running_loop(), 1, "test")
        started = threading.Event()

        def block() -> None:
            started.set()
            release.wait(10)

        pool.submit(block)
        await asyncio.to_thread(started.wait, 10)
        return pool

    with asyncio.Runner() as runner:
        pool = runner.run(main())
    release.set()
    for thread in pool._threads:
        thread.join(5)
        assert not thread.is_alive()


async def test_quick_jobs_are_left_to_one_thread(pool, monkeypatch):
    monkeypatch.setattr(
        "arpc.agent.server.thread_pool._HELP_AFTER_S", 60
    )  # a slow machine must not look like a stuck thread
    seen: set[int] = set()
    done = asyncio.Event()

    def job(number: int) -> Any:
        seen.add(threading.get_ident())
        return done.set if number == 99 else None

    for number in range(100):
        pool.submit(lambda number=number: job(number), is_quick=True)
    await done.wait()
    assert len(seen) == 1
    assert pool.statistics()["threads"] == 1


async def test_quick_jobs_behind_one_that_is_stuck_get_help(pool):
    release = threading.Event()
    done = asyncio.Event()
    pool.submit(lambda: release.wait(10) and None, is_quick=True)
    pool.submit(lambda: done.set, is_quick=True)
    await done.wait()
    release.set()
    assert pool.statistics()["threads"] == 2


async def test_what_is_stuck_holds_up_only_what_comes_at_once(pool, monkeypatch):
    """Once it has shown, nobody waits for it any more."""
    release = threading.Event()
    done = asyncio.Event()
    pool.submit(lambda: release.wait(10) and None, is_quick=True)
    pool.submit(lambda: done.set, is_quick=True)
    await done.wait()
    monkeypatch.setattr("arpc.agent.server.thread_pool._HELP_AFTER_S", 60)
    for _ in range(3):
        done.clear()
        pool.submit(lambda: done.set, is_quick=True)
        async with asyncio.timeout(10):
            await done.wait()
    release.set()
    await until(lambda: pool.statistics()["jobs_unfinished"] == 0)


async def test_the_thread_that_slept_last_is_woken(pool):
    """Its memory is warm, and the others need not hear of it."""
    both = threading.Barrier(2)
    await asyncio.gather(pool.call(both.wait, 10), pool.call(both.wait, 10))
    await until(lambda: len(pool._sleepers) == 2)
    seen = set()
    for _ in range(10):
        seen.add(await pool.call(threading.get_ident))
        await until(lambda: len(pool._sleepers) == 2)
    assert len(seen) == 1


class Letters(Outbox):
    """Remembers what was sent, and from where."""

    __slots__ = ("letters", "sent")

    def __init__(self) -> None:
        super().__init__()
        self.letters: list[int] = []
        self.sent: list[tuple[str, list[int]]] = []

    def send(self) -> None:
        self._send("thread")

    def send_on_loop(self) -> None:
        self._send("loop")

    def _send(self, by: str) -> None:
        letters, self.letters = self.letters, []
        if letters:
            self.sent.append((by, letters))

    def write(self, letter: int) -> Outbox:
        self.letters.append(letter)
        return self


async def test_a_thread_sends_what_many_quick_jobs_left_at_once(pool, monkeypatch):
    monkeypatch.setattr("arpc.agent.server.thread_pool._HELP_AFTER_S", 60)
    box = Letters()
    for number in range(100):
        pool.submit(lambda number=number: box.write(number), is_quick=True)
    await until(lambda: pool.statistics()["jobs_unfinished"] == 0 and not box.letters)
    await until(lambda: len(pool._sleepers) == 1)
    assert [letter for _, letters in box.sent for letter in letters] == [*range(100)]
    assert [len(letters) for _, letters in box.sent] == [32, 32, 32, 4]
    assert {by for by, _ in box.sent} == {"thread"}
    assert pool.jobs_answered == 100


async def test_an_outbox_tells_how_many_answers_go_at_once(pool, monkeypatch):
    monkeypatch.setattr("arpc.agent.server.thread_pool._HELP_AFTER_S", 60)
    box = Letters()
    box.answers_a_write = 8
    for number in range(20):
        pool.submit(lambda number=number: box.write(number), is_quick=True)
    await until(lambda: pool.jobs_answered == 20 and len(pool._sleepers) == 1)
    assert [len(letters) for _, letters in box.sent] == [8, 8, 4]


async def test_what_was_left_is_sent_before_a_job_that_may_take_long(pool):
    box = Letters()
    release = threading.Event()
    for is_quick in (True, False):
        pool.submit(lambda: box.write(1), is_quick=is_quick)
        pool.submit(lambda: release.wait(10) and None)
    await until(lambda: box.sent == [("thread", [1]), ("thread", [1])])
    release.set()
    await until(lambda: pool.statistics()["jobs_unfinished"] == 0)


async def test_what_was_left_before_a_job_that_is_stuck_is_sent_by_the_loop(pool):
    box = Letters()
    release = threading.Event()
    pool.submit(lambda: box.write(1), is_quick=True)
    pool.submit(lambda: release.wait(10) and None, is_quick=True)
    pool.submit(lambda: box.write(2), is_quick=True)
    await until(lambda: sum(len(letters) for _, letters in box.sent) == 2)
    assert not release.is_set()
    release.set()
    await until(lambda: pool.statistics()["jobs_unfinished"] == 0)


async def test_outboxes_of_several_connections_are_all_sent(pool, monkeypatch):
    monkeypatch.setattr("arpc.agent.server.thread_pool._HELP_AFTER_S", 60)
    boxes = [Letters(), Letters(), Letters()]
    for number in range(30):
        pool.submit(lambda number=number: boxes[number // 10].write(number), is_quick=True)
    await until(lambda: pool.jobs_answered == 30 and len(pool._sleepers) == 1)
    assert [box.sent for box in boxes] == [[("thread", [*range(10 * n, 10 * n + 10)])] for n in range(3)]


@pytest.mark.parametrize("is_quick", [True, False])
async def test_it_is_known_whether_a_thread_is_busy_for_long(pool, is_quick):
    begun, release = threading.Event(), threading.Event()
    assert (pool.is_asleep, pool.is_in_slow_job) == (True, False)
    pool.submit(lambda: begun.set() or (release.wait(10) and None), is_quick=is_quick)
    await until(begun.is_set)
    assert (pool.is_asleep, pool.is_in_slow_job) == (False, not is_quick)
    release.set()
    await until(lambda: pool.is_asleep)
    assert not pool.is_in_slow_job


def work_for(cpu_s: float) -> None:
    until_s = time.thread_time() + cpu_s
    while time.thread_time() < until_s:
        pass


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="the system does not tell")
async def test_it_is_known_how_long_threads_have_had_a_cpu():
    pool = ThreadPool(asyncio.get_running_loop(), 2, "test")
    assert pool.cpu_s == 0.0
    for _ in range(2):
        await pool.call(work_for, 0.005)
    used_s = pool.cpu_s
    assert 0.01 <= used_s <= time.process_time()
    await pool.call(work_for, 0.005)
    assert pool.cpu_s >= used_s + 0.005
    pool.close()
    assert await ended(pool, 5)
    assert pool.cpu_s == 0.0, "those that have ended are not asked"


async def test_where_the_system_does_not_tell_nobody_has_had_a_cpu(pool, monkeypatch):
    monkeypatch.delattr(time, "pthread_getcpuclockid", raising=False)
    await pool.call(work_for, 0.001)
    assert pool.cpu_s == 0.0


async def test_one_that_is_alone_begins_at_once(pool):
    """Not even the loop has to turn for it."""
    await pool.call(max, 1, 2)
    await until(lambda: len(pool._sleepers) == 1)
    begun = threading.Event()
    pool.submit(begun.set, is_alone=True)
    assert begun.wait(10)
    await until(lambda: pool.statistics()["jobs_unfinished"] == 0)


async def test_the_loop_gives_way_to_a_quick_job_unless_others_take_the_cpu(pool, monkeypatch):
    now, away_s, yields = 0.0, 0.0, 0

    def give_way() -> None:
        nonlocal now, yields
        now += away_s
        yields += 1

    monkeypatch.setattr("arpc.agent.server.thread_pool._yield_cpu", give_way)
    monkeypatch.setattr("arpc.agent.server.thread_pool._clock", lambda: now)
    for _ in range(10):
        pool._give_way()
    assert yields == 10
    away_s = 1.0
    for _ in range(100_000):
        pool._give_way()
    assert yields < 30, "it goes on to lose the CPU"
    away_s, yields = 0.0, 0
    for _ in range(500_000):
        pool._give_way()
    assert yields > 100_000, "it does not find out that nobody wants the CPU any more"


async def test_what_is_answered_late_is_sent_too():
    pool = ThreadPool(asyncio.get_running_loop(), 1, "test")
    box = Letters()
    pool.close()
    pool.submit(lambda: box.write(1))
    await until(lambda: box.sent == [("thread", [1])])
    assert pool.jobs_answered == 1


@pytest.mark.parametrize("has_eventfd", [True, False])
def test_a_wake_up_wakes_once_for_each_time_it_is_sent(monkeypatch, has_eventfd):
    if not has_eventfd:
        monkeypatch.delattr("os.eventfd", raising=False)
    wake_up = _WakeUp()
    heard: list[int] = []

    def wait() -> None:
        for number in range(3):
            wake_up.wait()
            heard.append(number)

    waiting = threading.Thread(target=wait, daemon=True)
    wake_up.send()  # before anybody waits
    waiting.start()
    wake_up.send()
    wake_up.send()
    waiting.join(10)
    assert heard == [0, 1, 2]
    numbers = wake_up.descriptors
    wake_up.close()
    for number in numbers:
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(number)


def test_a_function_that_is_always_quick_is_known_as_such():
    function = Function(len)
    for _ in range(7):
        function.quickness.measured(1e-6)
    assert not function.quickness.is_quick
    function.quickness.measured(1e-6)
    assert function.quickness.is_quick
    function.quickness.measured(1.0)
    assert not function.quickness.is_quick


async def test_few_calls_of_what_is_known_to_be_quick_are_measured(pair, monkeypatch):
    dispatcher = pair[1].agent.dispatcher
    (link,) = pair[1].agent.connector.links
    function = Function(len)
    for _ in range(8):
        function.quickness.measured(0.0)
    times = 0

    def count() -> float:
        nonlocal times
        times += 1
        return 1.0

    monkeypatch.setattr("arpc.agent.server.thread_job._clock", count)
    for number in range(64):
        job = ThreadJob(Run(dispatcher, link, function, number, 0, copy_context(), args=("",)))
        assert job.work() == job.finish
    assert times == 2 * 4
    assert function.quickness.is_quick
    times = 0
    job = ThreadJob(Run(dispatcher, link, function, 0, 0, copy_context(), args=(0,)))  # which has no length
    assert job.work() == job.finish
    assert times == 2, "those that fail take their time, too"
    assert isinstance(job.error, TypeError)
