"""Typical mistakes, and what somebody who makes them reads: what happened, where, and what to write instead."""

from __future__ import annotations

import asyncio
import gc
import inspect
import io
import re
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import arpc
from arpc.launch import breakpoints, ray_cluster
from arpc.testing import cluster
from arpc.wire import handshake
from tests.wire.handshakes import acceptor, connector, read


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.total = start

    def inc(self) -> int:
        self.total += 1
        return self.total

    async def wait(self) -> None:
        await asyncio.Event().wait()


def add(a: int, b: int = 1) -> int:
    return a + b


async def wait() -> None:
    await asyncio.Event().wait()


def numbers():
    yield 1


def make_lock() -> threading.Lock:
    return threading.Lock()


class Missing:
    """A function that this worker has and the others do not."""

    __qualname__ = "helper"

    def __call__(self) -> None:
        """Never called: it cannot be found."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _find, ("my_helpers",)


def _find(module: str) -> None:
    raise ModuleNotFoundError(f"No module named {module!r}")


async def drain(stream: Any) -> list[Any]:
    return [item async for item in stream]


async def use_released() -> None:
    rref = arpc.remote("worker1", Counter)
    await rref.release()
    await rref


async def nest_contexts() -> None:
    async with arpc.autograd.context(), arpc.autograd.context():
        pass


def enter(manager: Any) -> None:
    with manager:
        pass


async def wait_for(awaitable: Any) -> Any:
    return await awaitable


def remote_module(made: Any = nn.Linear, address: str = "worker1/cpu") -> arpc.nn.RemoteModule[Any]:
    return arpc.nn.RemoteModule(address, made, (2, 2) if made is nn.Linear else ())


def call(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    """What makes a call to another worker."""
    return lambda _: arpc.rpc_sync("worker1", *args, **kwargs)


MISTAKES: dict[str, tuple[Callable[[arpc.RRef[Counter]], Any], type[BaseException], str]] = {
    # -- RRefs
    "a method on the RRef itself": (
        lambda rref: rref.inc(),
        AttributeError,
        "The value is on worker 'worker1': call its method there with `await rref.rpc_sync().inc(...)`, or fetch",
    ),
    "an attribute of the value": (lambda rref: rref.total, AttributeError, "fetch a copy with `(await rref).total`"),
    "a method that is not there": (
        lambda rref: rref.rpc_sync().incc(),
        AttributeError,
        "'Counter' object has no attribute 'incc'",
    ),
    "the local value of a remote object": (
        lambda rref: rref.local_value(),
        arpc.RRefError,
        "can't call local_value() on user WorkerInfo(id=0, name=worker0). Call it on owner WorkerInfo(id=1",
    ),
    "a released RRef": (lambda _: use_released(), arpc.RRefError, "has been released"),
    "a pickled RRef": (
        lambda rref: rref.__reduce__(),
        arpc.SerializationError,
        "can be pickled as part of a call only",
    ),
    # -- streams
    "for over a stream": (
        lambda _: list(arpc.stream("worker1", numbers)),
        TypeError,
        "use `async for item in arpc.stream(...)`",
    ),
    "await of a stream": (
        lambda _: wait_for(arpc.stream("worker1", numbers)),
        TypeError,
        "a stream is not awaited: use `async for item in arpc.stream(...)`",
    ),
    "a stream of a plain function": (
        lambda _: drain(arpc.stream("worker1", add, (1,))),
        TypeError,
        "a stream needs something to iterate over, not int",
    ),
    "a call of a generator": (call(numbers), TypeError, "numbers is a generator: call it with arpc.stream"),
    "a stream without a window": (
        lambda _: arpc.stream("worker1", numbers, window=0),
        ValueError,
        "the window of a stream must be at least 1, not 0",
    ),
    # -- what is called, and with what
    "one argument without a tuple": (
        call(add, 1),
        TypeError,
        "args must be a tuple of arguments, not int: write args=(value,)",
    ),
    "a text for arguments": (call(add, "ab"), TypeError, "not str: write args=(value,)"),
    "a list for keywords": (call(add, (1,), [2]), TypeError, "kwargs must be a dict of arguments by name, not list"),
    "the result for the function": (
        lambda _: arpc.rpc_sync("worker1", add(1)),
        TypeError,
        "function should be callable, and int is not: pass the function itself, not its call or its name",
    ),
    "the name for the function": (call("add"), TypeError, "function should be callable, and str is not"),
    "too many arguments": (
        call(add, (1, 2, 3)),
        TypeError,
        "add() takes from 1 to 2 positional arguments but 3 were given",
    ),
    "an unknown keyword": (call(add, (1,), {"c": 1}), TypeError, "add() got an unexpected keyword argument 'c'"),
    "an argument that cannot travel": (
        lambda _: arpc.rpc_sync("worker1", add, (threading.Lock(),)),
        arpc.SerializationError,
        "argument 'a' of add (lock) cannot be sent: cannot pickle '_thread.lock' object",
    ),
    "a result that cannot travel": (
        call(make_lock),
        arpc.SerializationError,
        "the result of make_lock (lock) cannot be sent",
    ),
    "a future as an argument": (
        lambda _: arpc.rpc_sync("worker1", add, (arpc.rpc_async("worker1", add, (1,)),)),
        arpc.SerializationError,
        "a Future cannot be pickled: send its value, or an RRef to it",
    ),
    "a function that the callee lacks": (
        call(Missing()),
        arpc.SerializationError,
        "worker 'worker1' cannot unpack the call of helper: ModuleNotFoundError: No module named 'my_helpers'.",
    ),
    # -- to whom, and for how long
    "a name with a typo": (
        lambda _: arpc.rpc_sync("wroker1", add, (1,)),
        arpc.UnknownWorkerError,
        "there is no worker named 'wroker1' in the group; there are 'worker0' (id 0), 'worker1' (id 1)",
    ),
    "an id that nobody has": (
        lambda _: arpc.rpc_sync(17, add, (1,)),
        arpc.UnknownWorkerError,
        "there is no worker with the id 17 in the group",
    ),
    "no worker at all": (
        lambda _: arpc.rpc_sync(None, add, (1,)),
        TypeError,
        "a worker is given by name, id or WorkerInfo, not NoneType",
    ),
    "a function that never returns": (
        call(wait, timeout=0.05),
        arpc.RpcTimeoutError,
        "wait was sent to worker 'worker1' and did not end within its timeout of 0.05 s",
    ),
    "a method that never returns": (
        lambda rref: rref.rpc_sync(timeout=0.05).wait(),
        arpc.RpcTimeoutError,
        "Counter.wait was sent to worker 'worker1' and did not end within its timeout of 0.05 s",
    ),
    "a text for the timeout": (
        call(add, (1,), timeout="5"),
        TypeError,
        "a timeout is a number of seconds, 0 for none, not '5'",
    ),
    "a negative timeout": (call(add, (1,), timeout=-1), ValueError, "a timeout is 0 (none) or more seconds, not -1"),
    "wait() on the loop": (
        lambda rref: rref.rpc_async().inc().wait(),
        RuntimeError,
        "wait() would block the event loop it waits for: use `await future`",
    ),
    # -- starting and ending
    "with init_rpc": (
        lambda _: enter(arpc.init_rpc("x")),
        TypeError,
        "a worker starts on the event loop: use `async with arpc.init_rpc(...)`",
    ),
    "init_rpc that was not awaited": (
        lambda _: arpc.init_rpc("x").rpc_sync,
        AttributeError,
        "the worker has not started, and has no 'rpc_sync' yet: write `worker = await arpc.init_rpc(...)`",
    ),
    "a second init_rpc": (
        lambda _: wait_for(arpc.init_rpc("x", rank=0, world_size=1)),
        arpc.AlreadyInitializedError,
        "this context has the worker 'worker0' already. Shut it down first",
    ),
    "options as a dict": (
        lambda _: arpc.init_rpc("x", options={"rpc_timeout": 1}),
        arpc.ConfigurationError,
        "options must be arpc.RpcOptions(...), not dict",
    ),
    "an option out of range": (
        lambda _: arpc.RpcOptions(rpc_timeout=-1),
        arpc.ConfigurationError,
        "rpc_timeout must be 0 or more, not -1",
    ),
    "a graceful shutdown in a handler": (
        call(arpc.shutdown),
        arpc.ShutdownError,
        "a handler of worker 'worker1' cannot wait for all handlers to end, itself among them",
    ),
    # -- autograd, profiles, modules, optimizers
    "with autograd.context": (
        lambda _: enter(arpc.autograd.context()),
        TypeError,
        "use `async with arpc.autograd.context()`",
    ),
    "with profiler.profile": (
        lambda _: enter(arpc.profiler.profile()),
        TypeError,
        "use `async with arpc.profiler.profile()`",
    ),
    "contexts in each other": (lambda _: nest_contexts(), arpc.AutogradError, "Contexts cannot be nested"),
    "a backward pass of no context": (
        lambda _: arpc.autograd.backward(12345, [torch.ones(())]),
        arpc.AutogradError,
        "Could not find autograd context with id: 12345",
    ),
    "parameters() of a RemoteModule": (
        lambda _: remote_module().parameters(),
        arpc.UnsupportedError,
        "the module is on another worker: use `await m.remote_parameters()`",
    ),
    "an attribute of a RemoteModule": (
        lambda _: remote_module().weight,
        AttributeError,
        "'RemoteModule' object has no attribute 'weight'. Those of the module are on worker 'worker1'",
    ),
    "a RemoteModule of a module": (
        lambda _: remote_module(nn.Identity()),
        arpc.ConfigurationError,
        "a RemoteModule is made of a class, or of a function that returns a module, not of Identity()",
    ),
    "a RemoteModule of no module": (
        lambda _: wait_for(remote_module(Counter)),
        arpc.ConfigurationError,
        "a RemoteModule is made of what returns an nn.Module, and Counter returned Counter",
    ),
    "a device that is none": (
        lambda _: remote_module(address="worker1/tpu:0"),
        arpc.ConfigurationError,
        "'tpu:0' is no device",
    ),
    "an optimizer of parameters": (
        lambda _: arpc.optim.DistributedOptimizer(torch.optim.SGD, [nn.Parameter(torch.ones(2))], lr=0.1),
        arpc.ConfigurationError,
        "DistributedOptimizer takes RRefs to parameters, not Parameter. Parameters of this worker go as arpc.RRef(",
    ),
    # -- decorators
    "inline on async def": (lambda _: arpc.inline(wait), TypeError, "inline is for plain functions, and wait is not"),
    "batched on a generator": (
        lambda _: arpc.batched(numbers),
        TypeError,
        "batched is for plain functions and async def, and numbers is neither",
    ),
    "one_at_a_time on a generator": (
        lambda _: arpc.one_at_a_time(numbers),
        TypeError,
        "numbers yields, and a stream may take as long as its reader likes",
    ),
}


async def _result(made: Any) -> Any:
    return await made if inspect.isawaitable(made) else made


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_an_error_says_what_to_do(mistake: str) -> None:
    make, kind, text = MISTAKES[mistake]
    async with cluster(2):
        rref = arpc.remote("worker1", Counter)
        await rref.rpc_sync().inc()
        with pytest.raises(kind, match=re.escape(text)):
            await _result(make(rref))
        await rref.release()
        gc.collect()  # remote modules that were made by mistake


def test_there_are_forty_of_them() -> None:
    assert len(MISTAKES) >= 40


async def test_no_worker_in_this_context() -> None:
    with pytest.raises(arpc.NotInitializedError, match=re.escape("Call `await arpc.init_rpc(...)` first")):
        await arpc.rpc_sync("worker1", add, (1,))


async def test_a_forgotten_await_names_rpc_sync() -> None:
    async with cluster(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            arpc.rpc_sync("worker1", add, (1,))
            gc.collect()
    assert "coroutine 'arpc.rpc_sync' was never awaited" in [str(one.message).partition("\n")[0] for one in caught]


def test_another_protocol_version_is_a_handshake_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "PROTOCOL_VERSION", 1)
    monkeypatch.setattr(handshake, "OLDEST_VERSION", 1)
    hello = read(connector().start())
    monkeypatch.undo()
    with pytest.raises(arpc.HandshakeError, match="no common protocol version: worker 'bob' speaks 2 to 2"):
        acceptor().receive(hello)


def test_more_workers_than_a_ray_cluster_has_room_for() -> None:
    class Cluster:
        @staticmethod
        def cluster_resources() -> dict[str, float]:
            return {"CPU": 2.0}

    ray_cluster.check_room(Cluster(), 2, {"CPU": 1})
    text = "4 workers do not fit into this Ray cluster: they take 4 CPU (4 x 1), and the cluster has 2; 4 GPU (4 x 1)"
    with pytest.raises(arpc.LaunchError, match=re.escape(text)):
        ray_cluster.check_room(Cluster(), 4, {"CPU": 1, "GPU": 1})


def test_a_breakpoint_in_a_worker_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setenv("ARPC_NAME", "trainer1")
    monkeypatch.setenv("PYTHONBREAKPOINT", breakpoints.HOOK)
    with pytest.raises(RuntimeError, match=re.escape("in worker 'trainer1', which `arpc launch` started without")):
        sys.__breakpointhook__()  # noqa: T100 - what breakpoint() calls, whatever pytest has put in its place
