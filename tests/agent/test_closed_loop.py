"""A worker whose event loop is closed says so, in an error of arpc's own, and keeps nothing of what was asked of it."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch
import uvloop

import arpc
from arpc.agent.scope import WorkerScope, current_scope
from arpc.futures import collect_all
from arpc.testing.in_process_cluster import Cluster

OPTIONS = arpc.RpcOptions(gc_freeze=False)


class Thing:
    async def name(self) -> str:
        return "thing"


async def make_thing() -> Thing:
    """On the loop, so that no thread is started for it: nobody would end that."""
    return Thing()


async def echo(value: Any = None) -> Any:
    return value


class Left:
    """What is left when a loop has been closed."""

    def __init__(self, make_loop: Callable[[], asyncio.AbstractEventLoop], *, is_shut_down: bool) -> None:
        self.worker: arpc.Worker
        self.rref: arpc.RRef[Thing]
        self.pending: arpc.Future[Any]
        self.done: arpc.Future[Any]
        self.context_id = -1
        self.context = arpc.autograd.context()
        self.loss: torch.Tensor
        with asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(self._start(is_shut_down))

    async def _start(self, is_shut_down: bool) -> None:
        group = Cluster(OPTIONS, None, elastic=False)
        await group.start(["worker0", "worker1"])
        worker = self.worker = group[0]
        current_scope.set(WorkerScope(worker))
        for _ in range(3):
            await worker.rpc_sync("worker1", echo)
        self.rref = worker.remote("worker1", make_thing)
        assert await self.rref.rpc_sync().name() == "thing"
        self.done = worker.rpc_async("worker1", echo)
        await self.done
        self.pending = arpc.Future(loop=asyncio.get_running_loop())
        self.context_id = await self.context.__aenter__()
        weight = torch.ones(2, requires_grad=True)
        self.loss = (await worker.rpc_sync("worker1", echo, (weight,))).sum()
        if is_shut_down:
            await asyncio.gather(*(worker.shutdown(graceful=False) for worker in group))


async def _items(stream: Any) -> None:
    async for _ in stream:
        pass


async def _profile() -> None:
    async with arpc.profiler.profile():
        pass


USES: dict[str, Callable[[Left], Any]] = {
    "rpc_async": lambda left: left.worker.rpc_async("worker1", echo),
    "rpc_async with an argument": lambda left: left.worker.rpc_async("worker1", echo, (1,)),
    "rpc_async to nobody": lambda left: left.worker.rpc_async("nobody", echo),
    "rpc_async with a timeout": lambda left: left.worker.rpc_async("worker1", echo, timeout=1),
    "rpc_sync": lambda left: left.worker.rpc_sync("worker1", echo),
    "rpc_sync with a tensor": lambda left: left.worker.rpc_sync("worker1", echo, (torch.ones(2),)),
    "rpc_sync to nobody": lambda left: left.worker.rpc_sync("nobody", echo),
    "stream": lambda left: left.worker.stream("worker1", echo),
    "remote": lambda left: left.worker.remote("worker1", Thing),
    "remote with an argument": lambda left: left.worker.remote("worker1", echo, (torch.ones(2),)),
    "remote here": lambda left: left.worker.remote("worker0", Thing),
    "remote to nobody": lambda left: left.worker.remote("nobody", Thing),
    "method": lambda left: left.rref.rpc_async().name(),
    "method, awaited": lambda left: left.rref.rpc_sync().name(),
    "method, remote": lambda left: left.rref.remote().name(),
    "method, stream": lambda left: left.rref.stream().name(),
    "to_here": lambda left: left.rref.to_here(),
    "functions of the module": lambda _: arpc.rpc_async("worker1", echo),
    "rpc_sync of the module": lambda _: arpc.rpc_sync("worker1", echo),
    "remote of the module": lambda _: arpc.remote("worker1", Thing),
    "stream of the module": lambda _: arpc.stream("worker1", echo),
    "backward": lambda left: arpc.autograd.backward(left.context_id, [left.loss]),
    "profile": lambda _: _profile(),
    "then": lambda left: left.pending.then(print),
    "then of one that is done": lambda left: left.done.then(print),
    "set_result": lambda left: left.pending.set_result(1),
    "set_exception": lambda left: left.pending.set_exception(ValueError()),
    "cancel": lambda left: left.pending.cancel(),
    "wait": lambda left: left.pending.wait(20),
    "collect_all": lambda left: collect_all([left.pending]),
}
ONLY_IF_NOT_SHUT_DOWN: dict[str, Callable[[Left], Any]] = {
    "leaving a context": lambda left: left.context.__aexit__(None, None, None),
    "release": lambda left: left.rref.release(),
    "shutdown": lambda left: left.worker.shutdown(),
    "membership": lambda left: _items(left.worker.membership()),
    "on_peer_lost": lambda left: left.worker.on_peer_lost(print),
}


def _use(use: Callable[[Left], Any], left: Left) -> BaseException | None:
    """What it raises: at once, or when it is awaited on another loop."""

    async def wait(coroutine: Coroutine[Any, Any, Any]) -> None:
        async with asyncio.timeout(20):
            await coroutine

    token = current_scope.set(WorkerScope(left.worker))
    try:
        result = use(left)
        if asyncio.iscoroutine(result):
            asyncio.run(wait(result))
    except Exception as error:  # noqa: BLE001 - the tests look at it
        return error
    finally:
        current_scope.reset(token)
    return None


def _in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(60)
    assert results, "the thread hangs"
    return results[0]


def _left_over(worker: arpc.Worker) -> dict[str, int]:
    peers = worker.agent.peers
    return {
        "calls": sum(peer.calls_in_flight for peer in peers),
        "backlog": sum(len(peer.backlog) for peer in peers),
        "deferred": len(worker.agent.caller.deferred),
        "users": len(worker.rref_context.forks.users),
        "owned": len(worker.rref_context.forks.owned),
    }


@pytest.fixture(autouse=True)
def _nothing_unawaited() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
        gc.collect()
    unawaited = [str(warning.message) for warning in caught if "never awaited" in str(warning.message)]
    assert not unawaited


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("is_shut_down", [False, True], ids=["closed", "shut down"])
@pytest.mark.parametrize("thread", [False, True], ids=["its thread", "another thread"])
def test_every_use_says_that_the_worker_is_shut_down(make_loop, is_shut_down, thread):
    uses = USES if is_shut_down else USES | ONLY_IF_NOT_SHUT_DOWN
    wrong: dict[str, Any] = {}
    left = Left(make_loop, is_shut_down=is_shut_down)
    before = _left_over(left.worker)
    for name, use in uses.items():
        error = _in_thread(lambda use=use: _use(use, left)) if thread else _use(use, left)
        if not isinstance(error, arpc.ShutdownError):
            wrong[name] = error
        del error
    assert not wrong
    after = _left_over(left.worker)
    assert after["calls"] == after["backlog"] == after["deferred"] == 0
    assert after["users"] <= before["users"]
    assert after["owned"] <= before["owned"]


@pytest.mark.parametrize("use", [*USES, *ONLY_IF_NOT_SHUT_DOWN])
def test_the_first_use_says_so_too(use):
    left = Left(uvloop.new_event_loop, is_shut_down=False)
    error = _use((USES | ONLY_IF_NOT_SHUT_DOWN)[use], left)
    assert isinstance(error, arpc.ShutdownError)
    assert isinstance(error, RuntimeError)
    assert "event loop" in str(error)
    if "rpc" in use or "remote" in use or "method" in use or "stream" in use:
        assert not error.may_have_run
        assert "init_rpc" in str(error)


def test_shutting_down_again_on_another_loop_does_nothing():
    left = Left(uvloop.new_event_loop, is_shut_down=True)
    asyncio.run(left.worker.shutdown())


def test_a_call_between_two_runs_of_the_loop_is_made_in_the_next():
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        group = Cluster(OPTIONS, None, elastic=False)

        async def start() -> None:
            await group.start(["worker0", "worker1"])

        async def end(call: arpc.Future[Any]) -> Any:
            try:
                return await call
            finally:
                await asyncio.gather(*(worker.shutdown(graceful=False) for worker in group))

        runner.run(start())
        call = group[0].rpc_async("worker1", echo, (7,))
        assert runner.run(end(call)) == 7
