"""Calls with checked arguments: `arpc.on` names the worker, and arguments follow the function as in a local call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable
from typing import Any, ParamSpec, TypeVar, overload

from arpc.agent.agent import Agent
from arpc.agent.client.future import Future
from arpc.agent.client.streams import Stream
from arpc.ids import WorkerInfo
from arpc.options import Unset
from arpc.rref.context import RRefContext
from arpc.rref.handle import RRef, create_remote

__all__ = ["Callee"]

P = ParamSpec("P")
R = TypeVar("R")


class Callee:
    """A worker to call, with the timeout and the stream window of those calls. Returned by `arpc.on`.

    A type checker compares the arguments of each call with the function's parameters, and an editor completes them.
    """

    __slots__ = ("_agent", "_rrefs", "_timeout", "_to", "_window")

    def __init__(
        self, agent: Agent, rrefs: RRefContext, to: str | int | WorkerInfo, timeout: float | Unset, window: int
    ) -> None:
        self._agent = agent
        self._rrefs = rrefs
        self._to = to
        self._timeout = timeout
        self._window = window

    def __repr__(self) -> str:
        return f"<arpc.on({self._to!r}) of worker {self._agent.info.name!r}>"

    @overload
    def rpc_sync(
        self, func: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, R]: ...
    @overload
    def rpc_sync(
        self, func: Callable[P, asyncio.Future[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, R]: ...
    @overload
    def rpc_sync(self, func: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]: ...
    def rpc_sync(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Call ``func(*args, **kwargs)`` on that worker and return its result; ``await`` it. See `arpc.rpc_sync`."""
        return self._agent.call_and_wait(self._to, func, args, kwargs, self._timeout)

    @overload
    def rpc_async(
        self, func: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]: ...
    @overload
    def rpc_async(self, func: Callable[P, asyncio.Future[R]], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
    @overload
    def rpc_async(self, func: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
    def rpc_async(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start a call of ``func(*args, **kwargs)`` on that worker and return its `Future`, see `arpc.rpc_async`."""
        return self._agent.call(self._to, func, args, kwargs, self._timeout, depth=3)

    @overload
    def remote(self, func: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs) -> RRef[R]: ...
    @overload
    def remote(self, func: Callable[P, asyncio.Future[R]], /, *args: P.args, **kwargs: P.kwargs) -> RRef[R]: ...
    @overload
    def remote(self, func: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> RRef[R]: ...
    def remote(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RRef[Any]:
        """Run ``func(*args, **kwargs)`` on that worker and leave the result there, see `arpc.remote`."""
        return create_remote(self._rrefs, self._to, func, args, kwargs, self._timeout)

    @overload
    def stream(self, func: Callable[P, AsyncIterable[R]], /, *args: P.args, **kwargs: P.kwargs) -> Stream[R]: ...
    @overload
    def stream(self, func: Callable[P, Iterable[R]], /, *args: P.args, **kwargs: P.kwargs) -> Stream[R]: ...
    def stream(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Stream[Any]:
        """Iterate with ``async for`` over the items that ``func(*args, **kwargs)`` yields there, see `arpc.stream`."""
        return self._agent.stream(self._to, func, args, kwargs, self._timeout, self._window)
