"""The proxies that ``rref.rpc_async()`` and its like return: their attributes call the value's methods on its owner.

Two ways to name a method::

    rref.rpc_async().add(3)                    # by attribute: short, and its result is Any to a type checker
    rref.rpc_async()(Counter.add, 3)           # by the method itself: arguments and result are checked and completed

Python's types cannot express "the methods of T, each returning a Future of its result", so a type checker sees no more
of an attribute. A shell or notebook completes attributes from the value's type, if that is known at run time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from arpc.agent.client.future import Future
from arpc.agent.server.functions import name_of
from arpc.options import Unset

if TYPE_CHECKING:
    from arpc.rref.handle import RRef

__all__ = ["AsyncProxy", "RemoteProxy", "StreamProxy", "SyncProxy"]

T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")
R = TypeVar("R")


class _Proxy(Generic[T_co]):
    """The base of the proxies."""

    __slots__ = ("_rref", "_rref_call", "_timeout")

    def __init__(self, rref: RRef[T_co], call: Callable[..., Any], timeout: float | Unset) -> None:
        self._rref = rref
        self._rref_call = call
        self._timeout = timeout

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._rref!r}>"

    def __dir__(self) -> Iterable[str]:
        """Return the names for completion in a shell or notebook: the value's methods, if its type is known here."""
        known = self._rref.known_type()
        return super().__dir__() if known is None else [name for name in dir(known) if not name.startswith("_")]


def _named(method: Callable[..., Any]) -> str:
    return name_of(method).rpartition(".")[2]


class AsyncProxy(_Proxy[T_co]):
    """Calls methods and returns futures."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Callable[..., Future[Any]]:
        return partial(self._rref_call, name, self._timeout)

    @overload
    def __call__(
        self, method: Callable[Concatenate[T_co, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]: ...
    @overload
    def __call__(
        self, method: Callable[Concatenate[T_co, P], asyncio.Future[R]], *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[T_co, P], R], *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
    def __call__(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        made: Future[Any] = self._rref_call(_named(method), self._timeout, *args, **kwargs)
        return made


class SyncProxy(AsyncProxy[T_co]):
    """Calls methods; the caller awaits the results."""

    __slots__ = ()


class RemoteProxy(_Proxy[T_co]):
    """Calls methods and returns RRefs at once; the results stay on the owner."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Callable[..., RRef[Any]]:
        return partial(self._rref_call, name, self._timeout)

    @overload
    def __call__(
        self, method: Callable[Concatenate[T_co, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> RRef[R]: ...
    @overload
    def __call__(
        self, method: Callable[Concatenate[T_co, P], asyncio.Future[R]], *args: P.args, **kwargs: P.kwargs
    ) -> RRef[R]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[T_co, P], R], *args: P.args, **kwargs: P.kwargs) -> RRef[R]: ...
    def __call__(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> RRef[Any]:
        made: RRef[Any] = self._rref_call(_named(method), self._timeout, *args, **kwargs)
        return made


class StreamProxy(_Proxy[T_co]):
    """Iterates over the items that methods, or the value itself, yield."""

    __slots__ = ("_window",)

    def __init__(self, rref: RRef[T_co], call: Callable[..., Any], timeout: float | Unset, window: int) -> None:
        super().__init__(rref, call, timeout)
        self._window = window

    def __getattr__(self, name: str) -> Callable[..., AsyncIterator[Any]]:
        return partial(self._rref_call, name, self._timeout, self._window)

    @overload
    def __aiter__(self: StreamProxy[AsyncIterable[R]]) -> AsyncIterator[R]: ...
    @overload
    def __aiter__(self: StreamProxy[Iterable[R]]) -> AsyncIterator[R]: ...
    def __aiter__(self) -> AsyncIterator[Any]:
        items: AsyncIterator[Any] = self._rref_call(None, self._timeout, self._window)
        return items

    @overload
    def __call__(
        self, method: Callable[Concatenate[T_co, P], AsyncIterable[R]], *args: P.args, **kwargs: P.kwargs
    ) -> AsyncIterator[R]: ...
    @overload
    def __call__(
        self, method: Callable[Concatenate[T_co, P], Iterable[R]], *args: P.args, **kwargs: P.kwargs
    ) -> AsyncIterator[R]: ...
    def __call__(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        items: AsyncIterator[Any] = self._rref_call(_named(method), self._timeout, self._window, *args, **kwargs)
        return items
