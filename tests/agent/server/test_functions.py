"""What can be called: every kind of callable, how it is run, and how it travels."""

from __future__ import annotations

import asyncio
import functools
import operator
import re
import threading
from typing import Any

import pytest
import torch

import arpc
from arpc.agent.server.functions import Function, Mode, name_of, returns_coroutine
from arpc.functions import async_execution, inline
from arpc.wire.messages import MessageType
from tests.agent.stage import echo, echo_in_thread

# -- the callables


def where_it_runs() -> str:
    return threading.current_thread().name


async def where_a_coroutine_runs() -> str:
    return threading.current_thread().name


@inline
def where_it_runs_inline() -> str:
    return threading.current_thread().name


def join(*args: Any, **kwargs: Any) -> str:
    return " ".join([*map(str, args), *(f"{key}={value}" for key, value in kwargs.items())])


async def join_in_coroutine(*args: Any, **kwargs: Any) -> str:
    return join(*args, **kwargs)


class Counter:
    """An object whose methods are called where it is sent to."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counter) and other.count == self.count

    __hash__ = None  # a callable need not be hashable

    def __call__(self, step: int = 1) -> int:
        return self.count + step

    def add(self, step: int) -> int:
        return self.count + step

    async def add_in_coroutine(self, step: int) -> int:
        await asyncio.sleep(0)
        return self.count + step

    @classmethod
    def make(cls, count: int) -> Counter:
        return cls(count)

    @staticmethod
    def double(number: int) -> int:
        return 2 * number


class AsyncCallable:
    async def __call__(self, number: int) -> int:
        await asyncio.sleep(0)
        return number + 1


def hand_out_a_coroutine(number: int) -> Any:
    return echo(number + 1)


def generate(count: int):
    yield from range(count)


# -- how they are run


async def test_a_coroutine_function_runs_on_the_loop(pair):
    assert await pair[0].rpc_sync("worker1", where_a_coroutine_runs) == threading.current_thread().name


async def test_a_plain_function_runs_in_a_thread_of_its_worker(pair):
    assert (await pair[0].rpc_sync("worker1", where_it_runs)).startswith("arpc-worker1-")


async def test_an_inline_function_runs_on_the_loop(pair):
    assert await pair[0].rpc_sync("worker1", where_it_runs_inline) == threading.current_thread().name


@pytest.mark.parametrize(
    ("call", "mode"),
    [
        (echo, Mode.COROUTINE),
        (echo_in_thread, Mode.THREAD),
        (where_it_runs_inline, Mode.INLINE),
        (generate, Mode.GENERATOR),
        (functools.partial(functools.partial(echo), 1), Mode.COROUTINE),
        (functools.partial(generate, 1), Mode.GENERATOR),
        (Counter, Mode.THREAD),
        (Counter(), Mode.THREAD),
        (Counter().add, Mode.THREAD),
        (Counter().add_in_coroutine, Mode.COROUTINE),
        (Counter.make, Mode.THREAD),
        (AsyncCallable(), Mode.COROUTINE),
        (torch.add, Mode.THREAD),
        (torch.nn.Linear(1, 1), Mode.THREAD),
        (lambda: None, Mode.THREAD),
        (print, Mode.THREAD),
        (operator.add, Mode.THREAD),
    ],
    ids=lambda value: re.sub(r" at 0x[0-9a-f]+", "", repr(value)),  # the same in every process
)
def test_the_way_to_run_a_callable(call, mode):
    assert Function(call).mode is mode


async def test_an_async_generator_function_is_known_as_such():
    async def generate_later():
        yield 1

    assert Function(generate_later).mode is Mode.ASYNC_GENERATOR


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match=r"should be callable, and int is not"):
        Function(3)


def test_callables_are_named_as_people_know_them():
    assert name_of(echo) == "echo"
    assert name_of(Counter.add) == name_of(Counter().add) == "Counter.add"
    assert name_of(functools.partial(functools.partial(echo), 1)) == "echo"
    assert name_of(torch.add).endswith("add")
    assert name_of(Counter()) == "Counter"


# -- what is called


@pytest.mark.parametrize("function", [join, join_in_coroutine])
async def test_arguments_by_position_and_by_name(pair, function):
    rpc = pair[0].rpc_sync
    assert await rpc("worker1", function) == ""
    assert await rpc("worker1", function, args=(1, 2)) == "1 2"
    assert await rpc("worker1", function, args=[1], kwargs={"two": 2}) == "1 two=2"
    assert await rpc("worker1", function, kwargs={"a": 1, "b": 2}) == "a=1 b=2"
    assert await rpc("worker1", function, args=None, kwargs={}) == ""


async def test_a_function_that_hands_out_a_coroutine(pair):
    assert await pair[0].rpc_sync("worker1", hand_out_a_coroutine, args=(1,)) == 2
    assert await pair[0].rpc_sync("worker1", lambda number: echo(number + 1), args=(3,)) == 4


async def test_methods_of_an_object_that_is_sent_along(pair):
    counter = Counter(40)
    assert await pair[0].rpc_sync("worker1", counter.add, args=(2,)) == 42
    assert await pair[0].rpc_sync("worker1", counter.add_in_coroutine, args=(2,)) == 42
    assert await pair[0].rpc_sync("worker1", Counter.add, args=(counter, 2)) == 42


async def test_class_methods_static_methods_and_classes(pair):
    assert (await pair[0].rpc_sync("worker1", Counter, args=(3,))).count == 3
    assert (await pair[0].rpc_sync("worker1", Counter.make, args=(4,))).count == 4
    assert await pair[0].rpc_sync("worker1", Counter.double, args=(4,)) == 8


async def test_objects_that_can_be_called(pair):
    assert await pair[0].rpc_sync("worker1", Counter(1), args=(2,)) == 3
    assert await pair[0].rpc_sync("worker1", AsyncCallable(), args=(2,)) == 3


async def test_partials(pair):
    assert await pair[0].rpc_sync("worker1", functools.partial(join, 1, b=2), args=(3,)) == "1 3 b=2"
    assert await pair[0].rpc_sync("worker1", functools.partial(join_in_coroutine, 1), args=(3,)) == "1 3"


async def test_builtins(pair):
    assert await pair[0].rpc_sync("worker1", max, args=(1, 2)) == 2
    assert await pair[0].rpc_sync("worker1", operator.add, args=(1, 2)) == 3
    assert await pair[0].rpc_sync("worker1", str.upper, args=("a",)) == "A"
    assert await pair[0].rpc_sync("worker1", "a-b".split, args=("-",)) == ["a", "b"]


@pytest.mark.parametrize("function", [torch.add, torch.Tensor.add, torch._C._VariableFunctions.add])
async def test_operators_of_torch(pair, function):
    result = await pair[0].rpc_sync("worker1", function, args=(torch.ones(2), torch.ones(2)))
    assert result.tolist() == [2, 2]


async def test_functions_of_torch(pair):
    result = await pair[0].rpc_sync("worker1", torch.nn.functional.relu, args=(torch.tensor([-1.0, 1.0]),))
    assert result.tolist() == [0, 1]
    assert (await pair[0].rpc_sync("worker1", torch.ones, args=(2, 3))).shape == (2, 3)


async def test_a_module_is_called_where_it_is_sent_to(pair):
    linear = torch.nn.Linear(2, 1)
    inputs = torch.rand(3, 2)
    with torch.no_grad():
        expected = linear(inputs)
    assert torch.equal(await pair[0].rpc_sync("worker1", linear, args=(inputs,)), expected)
    assert torch.equal(await pair[0].rpc_sync("worker1", linear.forward, args=(inputs,)), expected)


async def test_lambdas_and_closures_travel_by_value(pair):
    offset = torch.tensor([1.0, 2.0])
    factor = 3

    def scale(value: torch.Tensor) -> torch.Tensor:
        return value * factor + offset

    assert (await pair[0].rpc_sync("worker1", scale, args=(torch.ones(2),))).tolist() == [4, 5]
    factor = 5
    assert (await pair[0].rpc_sync("worker1", scale, args=(torch.ones(2),))).tolist() == [6, 7], "as it is now"
    assert await pair[0].rpc_sync("worker1", lambda a, *, b: a + b, args=(1,), kwargs={"b": 2}) == 3


async def test_a_closure_that_waits(pair):
    delay = 0

    async def wait_and_add(a: int) -> int:
        await asyncio.sleep(delay)
        return a + 1

    assert await pair[0].rpc_sync("worker1", wait_and_add, args=(1,)) == 2


async def test_a_closure_captures_tensors_large_and_small(pair):
    small, large = torch.arange(4.0), torch.arange(100_000.0)
    total = await pair[0].rpc_sync("worker1", lambda: small.sum() + large.sum())
    assert torch.equal(total, small.sum() + large.sum())


# -- how they travel


async def sent(worker: arpc.Worker, type_: MessageType, times: int, **call: Any) -> int:
    """How many frames of a type a number of calls sends."""
    connection = worker.agent.peer("worker1").connection
    frames: list[bytes] = []
    write = connection._write

    def watch(data: Any) -> None:
        frames.append(bytes(data))
        write(data)

    connection._write = watch
    for _ in range(times):
        await worker.rpc_sync("worker1", **call)
    connection._write = write
    return sum(count_frames(data, type_) for data in frames)


def count_frames(data: bytes, type_: MessageType) -> int:
    from arpc.wire.frames import HEADER

    found = start = 0
    while start < len(data):
        length, frame_type = HEADER.unpack_from(data, start)[:2]
        found += frame_type == type_
        start += HEADER.size + length
    return found


async def test_a_function_of_a_module_is_sent_once(pair):
    assert await sent(pair[0], MessageType.FUNCTION, 5, func=join, args=(1,)) == 1
    assert await sent(pair[0], MessageType.FUNCTION, 5, func=join, args=(1,)) == 0
    assert await sent(pair[0], MessageType.FUNCTION, 5, func=torch.add, args=(torch.ones(1), 1)) == 1


async def test_what_travels_by_value_is_sent_each_time(pair):
    number = 1
    assert await sent(pair[0], MessageType.FUNCTION, 3, func=lambda: number) == 0
    assert await sent(pair[0], MessageType.FUNCTION, 3, func=Counter(1).add, args=(1,)) == 0


async def test_a_new_connection_knows_the_functions_of_the_old(pair):
    assert await pair[0].rpc_sync("worker1", join, args=("before",)) == "before"
    connection = pair[0].agent.peer("worker1").connection
    connection.abort()
    await connection.wait_closed()
    assert await pair[0].rpc_sync("worker1", join, args=("after",)) == "after"
    assert await pair[1].rpc_sync("worker0", join, args=("back",)) == "back"


async def test_a_function_made_anew_under_an_old_name_is_another(pair, monkeypatch):
    """Identity counts: the name alone may mean something else by now."""
    assert await pair[0].rpc_sync("worker1", join, args=(1,)) == "1"

    def join_anew(*args: Any) -> str:
        return "anew"

    join_anew.__qualname__ = join_anew.__name__ = "join"
    monkeypatch.setitem(globals(), "join", join_anew)
    assert await pair[0].rpc_sync("worker1", globals()["join"], args=(1,)) == "anew"


async def test_what_is_no_function_is_an_error(pair):
    with pytest.raises(TypeError, match="callable"):
        await pair[0].rpc_sync("worker1", 3)
    with pytest.raises(TypeError, match="callable"):
        await pair[0].rpc_sync("worker1", [])


async def test_wrong_arguments_are_an_error_of_the_function(pair):
    for function in (echo, echo_in_thread, where_it_runs_inline):
        with pytest.raises(TypeError, match="argument"):
            await pair[0].rpc_sync("worker1", function, args=(1, 2, 3))


# -- marks


def test_inline_is_for_plain_functions():
    async def coroutine() -> None: ...

    def generator():
        yield

    for wrong in (coroutine, generator, Counter):
        with pytest.raises(TypeError, match="inline is for plain functions"):
            inline(wrong)
    assert inline(where_it_runs_inline) is where_it_runs_inline


def test_async_execution_needs_something_to_mark():
    with pytest.raises(TypeError, match="wrap it"):
        async_execution(max)


def test_what_returns_a_coroutine_may_be_marked_to_run_as_one():
    @returns_coroutine
    def call() -> Any:
        return where_a_coroutine_runs()

    assert Function(call).mode is Mode.COROUTINE
    assert Function(where_it_runs).mode is Mode.THREAD


@pytest.mark.parametrize("kind", ["async def", "partial", "object", "method"])
def test_what_is_an_async_def_runs_as_a_coroutine(kind):
    class Callable:
        async def __call__(self) -> None: ...

        async def method(self) -> None: ...

    kinds = {
        "async def": where_a_coroutine_runs,
        "partial": functools.partial(join_in_coroutine, 1),
        "object": Callable(),
        "method": Callable().method,
    }
    assert Function(kinds[kind]).mode is Mode.COROUTINE
