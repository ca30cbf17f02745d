"""Where a test and the handlers it calls meet: workers of one process share this module.

A handler says how far it has come with `reached`, and a test awaits that; the test opens a gate, and a handler waits
for it. Points and gates have names, so that one test can have several.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import arpc
from arpc.errors import RpcTimeoutError

HANDLER_WAIT_S = 40.0
"""How long a thread waits at a gate. A test that forgets to open it must not keep the thread for ever."""


class Stage:
    """Points that were reached and gates that were opened during one test."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._points: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._gates: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._thread_gates: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        self.log: list[Any] = []

    def reached(self, point: str) -> None:
        """Say, on the loop or in a thread, that a point was reached."""
        self.log.append(point)
        self._loop.call_soon_threadsafe(self._points[point].set)

    def was_reached(self, point: str) -> bool:
        return point in self.log

    async def wait_until(self, *points: str) -> None:
        async with asyncio.timeout(30):
            for point in points:
                await self._points[point].wait()

    def open(self, gate: str = "gate") -> None:
        self._gates[gate].set()
        self._thread_gates[gate].set()

    async def pass_gate(self, gate: str = "gate") -> None:
        await self._gates[gate].wait()

    def pass_gate_in_thread(self, gate: str = "gate") -> None:
        assert self._thread_gates[gate].wait(HANDLER_WAIT_S), f"nobody opened {gate!r}"

    def close(self) -> None:
        """Let every thread go that still waits."""
        for gate in list(self._thread_gates.values()):
            gate.set()


async def outlast(point: str, call: Callable[[float], Awaitable[Any]]) -> pytest.ExceptionInfo[RpcTimeoutError]:
    """Make a call, with a timeout that passes after its handler has come to a point.

    A tenth of a second is enough for that as a rule. Where the machine is too busy, the call is made again with more.
    """
    for timeout_s in (0.1, 1.0, 10.0):
        with pytest.raises(RpcTimeoutError) as caught:
            await call(timeout_s)
        if the_stage().was_reached(point):
            return caught
    raise AssertionError(f"no handler came to {point!r} in time")


_stages: list[Stage] = []


def the_stage() -> Stage:
    """The stage of the running test."""
    return _stages[-1]


@contextmanager
def setting_stages() -> Iterator[Callable[[], Stage]]:
    """Gives what sets a stage on the running loop, and clears it all away in the end."""

    def set_stage() -> Stage:
        _stages.append(Stage())
        return the_stage()

    try:
        yield set_stage
    finally:
        while _stages:
            _stages.pop().close()


# -- handlers


async def echo(value: Any = None) -> Any:
    return value


async def echo_later(value: Any = None) -> Any:
    """Waits for one turn of the loop, so that it cannot end in its first step."""
    await asyncio.sleep(0)
    return value


def echo_in_thread(value: Any = None) -> Any:
    return value


@arpc.inline
def echo_inline(value: Any = None) -> Any:
    return value


async def hold(name: str = "held", value: Any = None) -> Any:
    """Waits at the gate; tells that it has begun, and how it ended."""
    stage = the_stage()
    stage.reached(f"{name} begun")
    try:
        await stage.pass_gate()
    except asyncio.CancelledError:
        stage.reached(f"{name} cancelled")
        raise
    stage.reached(f"{name} ended")
    return value


def hold_in_thread(name: str = "held", value: Any = None) -> Any:
    """The same in a thread, where nothing can be cancelled."""
    stage = the_stage()
    stage.reached(f"{name} begun")
    stage.pass_gate_in_thread()
    stage.reached(f"{name} ended")
    return value


async def call_on(to: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls another function from within a handler."""
    return await arpc.rpc_sync(to, function, args=args, kwargs=kwargs)


def call_on_in_thread(to: str, function: Any, *args: Any) -> Any:
    return arpc.rpc_async(to, function, args=args).wait()


async def wait_if(wait: bool) -> None:
    """For a handler that is to leave its first step behind, or not."""
    if wait:
        await asyncio.sleep(0)
