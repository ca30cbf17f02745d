"""Blocking calls, and futures of torch."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from arpc.compat import rpc
from arpc.compat.futures import wait_all
from arpc.compat.rpc.functions import async_execution


def add(a: int, b: int = 0) -> int:
    return a + b


def call_on(a: int) -> int:
    total: int = rpc.rpc_sync("alone", add, args=(a, 1))
    return total


def fail(text: str) -> None:
    raise ValueError(text)


def thread_name() -> str:
    return threading.current_thread().name


class OddError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(one, two)


def fail_oddly() -> None:
    raise OddError(1, 2)


@async_execution
def add_later(a: int, b: int) -> torch.futures.Future[int]:
    return rpc.rpc_async("alone", add, args=(a, b)).then(lambda future: future.value() + 1)


@async_execution
def no_future() -> int:
    return 1


async def block_the_loop() -> str:
    try:
        rpc.rpc_sync("alone", add, args=(1, 2))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_call_returns_what_the_function_returned(alone: str) -> None:
    assert rpc.rpc_sync(alone, add, args=(1,), kwargs={"b": 2}) == 3
    assert rpc.rpc_sync(0, add, args=[1, 2]) == 3
    assert torch.equal(rpc.rpc_sync(rpc.get_worker_info(), torch.add, args=(torch.ones(2), 1)), torch.full((2,), 2.0))


def test_a_function_may_call_on(alone: str) -> None:
    assert rpc.rpc_sync(alone, call_on, args=(1,)) == 2


def test_functions_run_in_threads_of_their_own(alone: str) -> None:
    assert rpc.rpc_sync(alone, thread_name) not in {threading.current_thread().name, "arpc-loop-alone"}


def test_a_callback_may_block_and_call_on(alone: str) -> None:
    future = rpc.rpc_async(alone, add, args=(1, 2)).then(lambda done: call_on(done.value()))
    assert future.wait() == 4


def test_many_callbacks_may_block_at_once(alone: str) -> None:
    meeting = threading.Barrier(8)
    futures = [
        rpc.rpc_async(alone, add, args=(n, 0)).then(lambda done: meeting.wait() and done.value()) for n in range(8)
    ]
    assert len(torch.futures.wait_all(futures)) == 8


def test_calls_from_many_threads_do_not_mix(alone: str) -> None:
    found: dict[int, list[int]] = {}

    def work(number: int) -> None:
        found[number] = [rpc.rpc_sync(alone, add, args=(number, n)) for n in range(20)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [number + n for n in range(20)] for number in range(8)}


def test_an_exception_keeps_its_type_and_tells_where_it_was_raised(alone: str) -> None:
    with pytest.raises(ValueError, match="On WorkerInfo\\(id=0, name=alone\\):\nValueError\\('no luck'\\)"):
        rpc.rpc_sync(alone, fail, args=("no luck",))
    with pytest.raises(ValueError, match="no luck"):
        rpc.rpc_async(alone, fail, args=("no luck",)).wait()


def test_what_raised_is_printed_where_it_ran(alone: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no luck"):
        rpc.rpc_sync(alone, fail, args=("no luck",))
    assert "ValueError('no luck')" in capsys.readouterr().err


def test_an_exception_that_takes_more_than_a_text_is_told_of(alone: str) -> None:
    with pytest.raises(RuntimeError, match="Original exception on remote side was"):
        rpc.rpc_sync(alone, fail_oddly)


def test_an_operator_that_is_called_wrongly_says_so_as_torch_does(alone: str) -> None:
    with pytest.raises(RuntimeError, match="Overloaded torch operator invoked from Python failed to match any schema"):
        rpc.rpc_sync(alone, torch.add, args=())


def test_a_timeout_is_a_runtime_error_and_the_function_runs_to_its_end(alone: str) -> None:
    _ended.clear()
    with pytest.raises(RuntimeError, match=r"RPC ran for more than set timeout \(50 ms\)"):
        rpc.rpc_sync(alone, sleep_and_tell, timeout=0.05)
    assert _ended.wait(30)


_ended = threading.Event()


def sleep_and_tell() -> None:
    time.sleep(0.2)
    _ended.set()


def test_async_execution_answers_with_the_value_of_the_future(alone: str) -> None:
    assert rpc.rpc_sync(alone, add_later, args=(1, 2)) == 4
    with pytest.raises(RuntimeError, match=r"must return a torch\.futures\.Future"):
        rpc.rpc_sync(alone, no_future)


def test_the_loop_thread_is_never_blocked(alone: str) -> None:
    assert "await arpc.rpc_sync" in rpc.rpc_sync(alone, block_the_loop)


async def test_a_loop_of_the_script_may_be_blocked(alone: str) -> None:
    assert rpc.rpc_sync(alone, add, args=(1, 2)) == 3


@pytest.mark.parametrize(
    ("to", "function", "kind", "text"),
    [
        ("nobody", add, RuntimeError, "name:alone,rank:0 could not find destination name nobody"),
        (7, add, RuntimeError, "could not find destination id 7"),
        (0.5, add, ValueError, "Cannot get WorkerInfo from name 0.5"),
        ("alone", 1, TypeError, "function should be callable."),
    ],
)
def test_a_call_that_cannot_be_is_refused_at_once(
    alone: str, to: Any, function: Any, kind: type[Exception], text: str
) -> None:
    for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(kind, match=text):
            call(to, function)


def test_wait_all_ends_with_the_first_error(alone: str) -> None:
    futures: list[torch.futures.Future[None]] = [rpc.rpc_async(alone, fail, args=("first",)), torch.futures.Future()]
    with pytest.raises(ValueError, match="first"):
        wait_all(futures)
    assert wait_all([]) == []


def test_without_a_worker_there_are_no_calls() -> None:
    with pytest.raises(
        RuntimeError, match=r"^RPC has not been initialized\. Call torch\.distributed\.rpc\.init_rpc first\."
    ):
        rpc.rpc_sync("alone", add)
    with pytest.raises(RuntimeError, match="Current RPC agent is not set!"):
        rpc.RRef(1)
