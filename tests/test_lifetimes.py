"""What a handler held is gone when it has ended: nothing waits for Python's garbage collector, which comes seldom.

A cycle among the runtime's own objects would keep whatever they lead to, a model or a tensor of gigabytes, until then.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress

import pytest

import arpc
from arpc.testing import cluster
from tests.agent.leftovers import until


class Held:
    """What takes memory in real life."""


HELD: weakref.WeakSet[Held] = weakref.WeakSet()


def hold() -> Held:
    held = Held()
    HELD.add(held)
    return held


def make() -> Held:
    return hold()


@arpc.inline
def make_inline() -> Held:
    return hold()


async def make_async() -> Held:
    return hold()


async def make_later() -> Held:
    await asyncio.sleep(0)
    return hold()


async def wait() -> None:
    held = hold()
    await asyncio.Event().wait()
    del held


async def count() -> AsyncIterator[int]:
    held = hold()
    for number in range(100):
        yield number
    del held


def count_in_thread() -> Iterator[int]:
    held = hold()
    yield from range(100)
    del held


async def is_there(rref: arpc.RRef[Held]) -> bool:
    return isinstance(await rref.local_value(), Held)


def creation_of(function: Callable[[], object]) -> Callable[[], Awaitable[None]]:
    async def create() -> None:
        rref = arpc.remote("worker1", function)
        assert await arpc.rpc_sync("worker1", is_there, (rref,))
        assert HELD

    return create


async def fail() -> None:
    await asyncio.sleep(0)
    raise LookupError("nothing there")


async def fail_by_a_call() -> None:
    held = hold()
    await arpc.rpc_sync("worker0", fail)
    del held


def fail_by_a_call_in_thread() -> None:
    held = hold()
    arpc.rpc_async("worker0", fail).wait()
    del held


def failure_of(function: Callable[[], object]) -> Callable[[], Awaitable[None]]:
    async def call() -> None:
        with pytest.raises(LookupError):
            await arpc.rpc_sync("worker1", function)

    return call


async def run_late() -> None:
    with pytest.raises(arpc.RpcTimeoutError):
        await arpc.rpc_sync("worker1", wait, timeout=0.05)


async def be_cancelled() -> None:
    future = arpc.rpc_async("worker1", wait)
    await until(lambda: bool(HELD))
    future.cancel()
    with suppress(asyncio.CancelledError):
        await future


def reading_of(generator: Callable[[], object], items: int) -> Callable[[], Awaitable[None]]:
    async def read() -> None:
        stream = arpc.stream("worker1", generator)
        async for number in stream:
            if number == items:
                break
        await stream.aclose()

    return read


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(creation_of(make), id="value-of-a-function"),
        pytest.param(creation_of(make_inline), id="value-of-an-inline-function"),
        pytest.param(creation_of(make_async), id="value-of-a-coroutine"),
        pytest.param(creation_of(make_later), id="value-of-one-that-waits"),
        pytest.param(creation_of(lambda: hold()), id="value-of-a-function-sent-by-value"),  # noqa: PLW0108
        pytest.param(failure_of(fail_by_a_call), id="failed-by-a-call"),
        pytest.param(failure_of(fail_by_a_call_in_thread), id="failed-by-a-call-in-a-thread"),
        pytest.param(run_late, id="past-its-deadline"),
        pytest.param(be_cancelled, id="cancelled"),
        pytest.param(reading_of(count, 100), id="stream-at-its-end"),
        pytest.param(reading_of(count, 3), id="stream-that-was-left"),
        pytest.param(reading_of(count_in_thread, 100), id="stream-of-a-thread-at-its-end"),
        pytest.param(reading_of(count_in_thread, 3), id="stream-of-a-thread-that-was-left"),
    ],
)
async def test_what_was_held_does_not_wait_for_the_collector(use):
    HELD.clear()
    async with cluster(2):
        gc.disable()
        try:
            for _ in range(2):
                await use()
            await until(lambda: not HELD)
        finally:
            gc.enable()


GATES: dict[str, asyncio.Event] = {}


async def pass_gate(name: str) -> None:
    await GATES[name].wait()


async def test_a_call_of_a_thread_that_is_refused_is_found_by_the_collector():
    """The error's traceback leads to frames of the sender, and they must not lead on through untracked objects."""
    options = arpc.RpcOptions(gc_freeze=False, max_calls_in_flight=1, max_calls_waiting=1)
    gate = GATES["refused"] = asyncio.Event()

    def call_in_vain() -> weakref.ref[Held]:
        held = hold()
        future = arpc.rpc_async("worker1", pass_gate, ("refused",))
        future.add_done_callback(lambda _, held=held: None)
        with pytest.raises(arpc.OverloadedError):
            future.wait()
        future.held = held
        return weakref.ref(held)

    async with cluster(2, options=options):
        await arpc.rpc_sync("worker1", make_async)
        accepted = [arpc.rpc_async("worker1", pass_gate, ("refused",)) for _ in range(2)]
        gone = await asyncio.to_thread(call_in_vain)
        gc.collect()
        assert gone() is None
        gate.set()
        await asyncio.gather(*accepted)
    del GATES["refused"]
