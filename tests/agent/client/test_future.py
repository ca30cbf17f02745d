"""Futures: on the loop, from threads, chained, and dropped without a look."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import pickle
import threading
from typing import Any

import pytest
import torch

import arpc
from arpc.agent.client.future import Future
from arpc.errors import SerializationError, ShutdownError
from arpc.futures import collect_all, wait_all
from tests.agent.stage import echo, echo_in_thread, hold


async def fail(text: str = "failed") -> None:
    raise LookupError(text)


def new() -> Future[Any]:
    return Future(loop=asyncio.get_running_loop())


# -- on the loop


async def test_it_is_awaited_any_number_of_times(pair):
    future = pair[0].rpc_async("worker1", echo, args=("value",))
    assert isinstance(future, arpc.Future)
    assert not future.done()
    assert await future == await future == "value"
    assert future.done()
    assert future.value() == future.result() == "value"
    assert future.exception() is None


async def test_it_has_no_value_before_its_time(pair):
    future = pair[0].rpc_async("worker1", echo)
    with pytest.raises(asyncio.InvalidStateError):
        future.value()
    await future


async def test_its_value_raises_its_error(pair):
    future = pair[0].rpc_async("worker1", fail)
    with pytest.raises(LookupError):
        await future
    with pytest.raises(LookupError):
        future.value()


async def test_people_may_make_their_own():
    future = new()
    done: list[Any] = []
    future.add_done_callback(lambda future: done.append(future.value()))
    future.set_result(1)
    assert await future == 1
    await asyncio.sleep(0)
    assert done == [1]
    with pytest.raises(asyncio.InvalidStateError):
        future.set_result(2)
    failed = new()
    failed.set_exception(LookupError("mine"))
    with pytest.raises(LookupError, match="mine"):
        await failed


async def test_it_works_with_what_asyncio_offers(pair):
    first = pair[0].rpc_async("worker1", echo, args=(1,))
    second = pair[0].rpc_async("worker1", echo, args=(2,))
    assert await asyncio.gather(first, second) == [1, 2]
    done, pending = await asyncio.wait([pair[0].rpc_async("worker1", echo, args=(3,))])
    assert [future.result() for future in done] == [3]
    assert not pending
    assert await asyncio.wait_for(pair[0].rpc_async("worker1", echo, args=(4,)), 30) == 4


async def test_it_cannot_be_pickled(pair):
    future = new()
    with pytest.raises(TypeError, match=r"Future cannot be pickled.*RRef"):
        pickle.dumps(future)
    with pytest.raises(SerializationError, match=r"argument 'value' of echo \(Future\).*Future cannot be pickled"):
        await pair[0].rpc_sync("worker1", echo, args=(future,))
    future.cancel()


# -- from threads


async def test_a_thread_waits_for_it(pair):
    future = pair[0].rpc_async("worker1", echo, args=("value",))
    assert await asyncio.to_thread(future.wait) == "value"
    assert await asyncio.to_thread(future.wait) == "value", "also when it is there already"


async def test_a_thread_gets_its_error(pair):
    future = pair[0].rpc_async("worker1", fail, args=("for the thread",))
    with pytest.raises(LookupError, match="for the thread"):
        await asyncio.to_thread(future.wait)


async def test_a_thread_hears_of_its_cancellation(pair, stage):
    future = pair[0].rpc_async("worker1", hold)
    waiting = asyncio.create_task(asyncio.to_thread(wait_for_cancellation, future))
    await stage.wait_until("held begun")
    future.cancel()
    assert await waiting


def wait_for_cancellation(future: Future[Any]) -> bool:
    try:
        future.wait(30)
    except asyncio.CancelledError:
        return True
    return False


async def test_a_thread_waits_no_longer_than_it_says():
    future = new()
    with pytest.raises(TimeoutError, match=r"no value after 0\.01 s"):
        await asyncio.to_thread(future.wait, 0.01)
    future.cancel()


async def test_waiting_on_the_loop_is_refused(pair):
    future = pair[0].rpc_async("worker1", echo)
    with pytest.raises(RuntimeError, match="await future"):
        future.wait()
    await future


async def test_a_thread_makes_calls(pair):
    def calls() -> list[Any]:
        futures = [pair[0].rpc_async("worker1", echo, args=(number,)) for number in range(10)]
        return [future.wait(30) for future in futures]

    assert await asyncio.to_thread(calls) == list(range(10))


async def test_what_is_wrong_with_a_call_of_a_thread_is_in_its_future(pair):
    def calls() -> list[BaseException | None]:
        futures = [
            pair[0].rpc_async("worker1", echo, args=(threading.Lock(),)),
            pair[0].rpc_async("worker1", echo, timeout=-1),
            pair[0].rpc_async("nobody", echo),
            pair[0].rpc_async(("nobody",), echo),
        ]
        errors = []
        for future in futures:
            try:
                errors.append(future.wait(30))
            except Exception as error:  # noqa: BLE001 - whatever it is, it is looked at below
                errors.append(error)
        return errors

    errors = await asyncio.to_thread(calls)
    assert [type(error) for error in errors] == [SerializationError, ValueError, arpc.UnknownWorkerError, TypeError]


async def test_a_thread_cancels_a_call_before_it_begins_or_soon_after(pair, stage):
    def call_and_cancel() -> Future[Any]:
        future = pair[0].rpc_async("worker1", hold)
        assert future.cancel()
        return future

    future = await asyncio.to_thread(call_and_cancel)
    with pytest.raises(asyncio.CancelledError):
        await future


async def test_a_thread_sets_result_and_exception():
    good, bad = new(), new()
    await asyncio.to_thread(good.set_result, "from a thread")
    await asyncio.to_thread(bad.set_exception, LookupError("from a thread"))
    assert await good == "from a thread"
    with pytest.raises(LookupError, match="from a thread"):
        await bad


def test_a_thread_does_not_wait_for_a_loop_that_was_closed():
    heard: list[ShutdownError] = []

    def wait(future: Future[Any], started: threading.Event) -> None:
        started.set()
        try:
            future.wait()
        except ShutdownError as error:
            heard.append(error)

    async def main() -> threading.Thread:
        started = threading.Event()
        thread = threading.Thread(target=wait, args=(new(), started))
        thread.start()
        await asyncio.to_thread(started.wait)
        return thread

    with asyncio.Runner() as runner:
        thread = runner.run(main())
    thread.join(30)
    assert "event loop of this future is closed" in str(heard[0])


# -- chains


async def test_then_gets_the_future_and_makes_another(pair):
    future = pair[0].rpc_async("worker1", echo, args=(20,))
    doubled = future.then(lambda future: future.value() * 2)
    assert isinstance(doubled, Future)
    assert await doubled.then(lambda future: future.value() + 2) == 42


async def test_then_on_one_that_is_done():
    future = new()
    future.set_result(1)
    assert await future.then(lambda future: future.value() + 1) == 2


async def test_then_runs_for_errors_too(pair):
    future = pair[0].rpc_async("worker1", fail)
    assert await future.then(lambda future: type(future.exception()).__name__) == "LookupError"


async def test_an_error_goes_down_the_chain(pair):
    last = (
        pair[0]
        .rpc_async("worker1", fail, args=("first",))
        .then(lambda future: future.value())
        .then(lambda f: f.value())
    )
    with pytest.raises(LookupError, match="first"):
        await last


async def test_an_error_of_the_callback_is_the_new_futures(pair):
    future = pair[0].rpc_async("worker1", echo, args=(0,))
    failed = future.then(lambda future: 1 // future.value())
    with pytest.raises(ZeroDivisionError):
        await failed
    assert await future == 0


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), StopIteration(1)])
async def test_a_callback_cannot_stop_the_loop(error):
    future = new()

    def callback(_: Future[Any]) -> None:
        raise error

    chained = future.then(callback)
    future.set_result(None)
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - the type is what is asked below
        await chained
    assert type(caught.value) is (RuntimeError if isinstance(error, StopIteration) else type(error))


async def test_an_async_callback_is_awaited(pair):
    async def call_again(future: Future[Any]) -> Any:
        return await pair[0].rpc_async("worker1", echo, args=(future.value() + 1,))

    assert await pair[0].rpc_async("worker1", echo, args=(1,)).then(call_again) == 2


async def test_an_async_callback_may_fail():
    async def callback(future: Future[Any]) -> None:
        raise LookupError(future.value())

    future = new()
    chained = future.then(callback)
    future.set_result("why")
    with pytest.raises(LookupError, match="why"):
        await chained


async def test_cancelling_the_end_of_a_chain_cancels_the_call(pair, stage):
    last = pair[0].rpc_async("worker1", hold).then(lambda future: future.value()).then(lambda future: future.value())
    await stage.wait_until("held begun")
    last.cancel()
    with pytest.raises(asyncio.CancelledError):
        await last
    await stage.wait_until("held cancelled")


async def test_cancelling_a_chain_cancels_its_async_callback(pair, stage):
    async def call_and_hold(_: Future[Any]) -> None:
        await pair[0].rpc_sync("worker1", hold)

    last = pair[0].rpc_async("worker1", echo).then(call_and_hold)
    await stage.wait_until("held begun")
    last.cancel()
    await stage.wait_until("held cancelled")


async def test_a_cancelled_call_cancels_the_chain(pair, stage):
    future = pair[0].rpc_async("worker1", hold)
    chained = future.then(lambda future: future.value())
    await stage.wait_until("held begun")
    future.cancel()
    with pytest.raises(asyncio.CancelledError):
        await chained


async def test_then_from_a_thread(pair):
    def chain() -> Any:
        return pair[0].rpc_async("worker1", echo, args=(1,)).then(lambda future: future.value() + 1).wait(30)

    assert await asyncio.to_thread(chain) == 2


async def test_then_takes_functions_only():
    future = new()
    with pytest.raises(TypeError, match="takes a function, not int"):
        future.then(3)
    future.cancel()


# -- several


async def test_collect_all_gives_the_futures_when_all_are_done(pair):
    futures = [pair[0].rpc_async("worker1", echo, args=(1,)), pair[0].rpc_async("worker1", fail)]
    collected = await collect_all(futures)
    assert collected == futures
    assert all(future.done() for future in futures)
    assert futures[0].value() == 1
    assert isinstance(futures[1].exception(), LookupError)


async def test_collect_all_of_none():
    assert await collect_all([]) == []


async def test_collect_all_in_a_thread(pair):
    def collect() -> list[Any]:
        futures = [pair[0].rpc_async("worker1", echo, args=(number,)) for number in range(3)]
        return [future.value() for future in collect_all(futures).wait(30)]

    assert await asyncio.to_thread(collect) == [0, 1, 2]


async def test_wait_all_gives_the_values_in_order(pair):
    futures = [
        pair[0].rpc_async("worker1", function, args=(n,)) for n, function in enumerate([echo_in_thread, echo] * 3)
    ]
    assert await wait_all(futures) == list(range(6))
    assert await wait_all([]) == []


async def test_wait_all_raises_the_first_error_at_once(pair, stage):
    futures = [pair[0].rpc_async("worker1", hold), pair[0].rpc_async("worker1", fail)]
    with pytest.raises(LookupError):
        await wait_all(futures)
    assert not futures[0].done()
    stage.open()
    await futures[0]


# -- errors nobody looked at


async def test_an_error_never_looked_at_is_logged_once_with_the_line_of_the_call(pair, caplog):
    done = asyncio.Event()
    line = inspect.currentframe().f_lineno + 1
    future = pair[0].rpc_async("worker1", fail, args=("unseen",))
    future.add_done_callback(lambda _: done.set())
    await done.wait()
    with caplog.at_level(logging.ERROR):
        del future
        gc.collect()
    (record,) = [record for record in caplog.records if "never retrieved" in record.message]
    assert f"called at {__file__}:{line}" in record.message
    assert isinstance(record.exc_info[1], LookupError)


@pytest.mark.parametrize("look", [Future.exception, lambda future: future.then(lambda done: done.exception())])
async def test_an_error_that_was_looked_at_is_not_logged(pair, caplog, look):
    future = pair[0].rpc_async("worker1", fail)
    await asyncio.wait([future])
    looked = look(future)
    if isinstance(looked, Future):
        await looked
    del future, looked
    gc.collect()
    assert not caplog.records


async def test_calls_through_the_module_are_traced_to_their_own_line(pair):
    from arpc.agent.scope import WorkerScope, current_scope

    current_scope.set(WorkerScope(pair[0]))
    line = inspect.currentframe().f_lineno + 1
    future = arpc.rpc_async("worker1", echo)
    assert f"called at {__file__}:{line}" in repr(future)
    await future


async def test_one_made_by_hand_has_no_line():
    future = new()
    assert "called at" not in repr(future)
    future.cancel()


# -- torch's state


def test_what_a_callback_switches_off_reaches_nobody_else():
    async def main() -> list[bool]:
        future = new()
        chained = future.then(lambda _: torch.set_grad_enabled(False))
        future.set_result(None)
        await chained
        seen = [torch.is_grad_enabled()]
        await asyncio.sleep(0)
        return [*seen, torch.is_grad_enabled()]

    assert arpc.run(main) == [True, True]
