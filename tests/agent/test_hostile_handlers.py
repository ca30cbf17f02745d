"""Nothing that a user's function raises, wherever it runs, takes the worker down: that call fails, and no other."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import arpc
from arpc.testing import cluster
from tests.agent.leftovers import assert_both_alive, assert_nothing_left, warm_up

OPTIONS = arpc.RpcOptions(gc_freeze=False, rref_grace=0.2, control_backoff=0.02)


class Unruly(BaseException):
    """What nobody expects."""


KINDS: dict[str, Callable[[], BaseException]] = {
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "Unruly": lambda: Unruly("why"),
    "GeneratorExit": GeneratorExit,
    "StopIteration": lambda: StopIteration(1),
    "CancelledError": asyncio.CancelledError,
    "RecursionError": RecursionError,
}


def raise_it(kind: str) -> None:
    error = KINDS[kind]()
    raise error


async def at_once(kind: str) -> None:
    raise_it(kind)


async def later(kind: str) -> None:
    await asyncio.sleep(0)
    raise_it(kind)


def in_thread(kind: str) -> None:
    raise_it(kind)


@arpc.inline
def inline(kind: str) -> None:
    raise_it(kind)


@arpc.functions.async_execution
def by_future(kind: str) -> Any:
    done: concurrent.futures.Future[None] = concurrent.futures.Future()
    done.set_exception(KINDS[kind]())
    return done


class Explosive:
    """Raises when it is unpacked."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        return in_thread, (self.kind,)


async def take(_: Any) -> None:
    raise AssertionError("it cannot be unpacked")


async def give(kind: str) -> Any:
    return Explosive(kind)


async def items(kind: str) -> AsyncIterator[int]:
    yield 1
    raise_it(kind)


def plain_items(kind: str) -> Iterator[int]:
    yield 1
    raise_it(kind)


class Thing:
    """An object whose method raises."""

    def __init__(self, kind: str | None = None) -> None:
        if kind is not None:
            raise_it(kind)

    async def fail(self, kind: str) -> None:
        raise_it(kind)


async def call(worker: arpc.Worker, way: str, kind: str) -> None:
    if way in {"items", "plain_items"}:
        async for _ in worker.stream("worker1", globals()[way], args=(kind,)):
            pass
    elif way == "take":
        await worker.rpc_sync("worker1", take, args=(Explosive(kind),))
    elif way == "creation":
        await worker.remote("worker1", Thing, args=(kind,))
    elif way == "method":
        await worker.remote("worker1", Thing).rpc_sync().fail(kind)
    else:
        await worker.rpc_sync("worker1", globals()[way], args=(kind,))


WAYS = (
    *("at_once", "later", "in_thread", "inline", "by_future"),
    *("take", "give", "items", "plain_items", "creation", "method"),
)


@pytest.mark.parametrize("kind", KINDS)
async def test_no_exception_of_a_users_code_takes_a_worker_down(kind, caplog):
    async with cluster(2, options=OPTIONS) as group:
        await warm_up(group)
        with caplog.at_level(logging.CRITICAL):
            for way in WAYS:
                caller = asyncio.create_task(call(group[0], way, kind))
                await asyncio.wait([caller], timeout=20)
                assert caller.done(), f"{way} hangs"
                assert not caller.cancelled(), f"{way} cancelled its caller"
                error = caller.exception()
                assert isinstance(error, Exception), f"{way}: {error!r}"
                assert not isinstance(error, arpc.WorkerLostError), f"{way}: {error!r}"
                await assert_both_alive(group)
        await assert_nothing_left(group)


async def exit_process() -> None:
    sys.exit("by mistake")


async def test_the_caller_is_told_what_it_was():
    async with cluster(2, options=OPTIONS) as group:
        with pytest.raises(arpc.RemoteError, match="SystemExit on worker 'worker1': by mistake"):
            await group[0].rpc_sync("worker1", exit_process)
