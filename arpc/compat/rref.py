"""RRef as torch has it: the methods of an `arpc.RRef`, blocking."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, Generic, NoReturn, TypeVar

import torch

from arpc.agent.client.future import Future
from arpc.compat import current
from arpc.compat.calls import arpc_timeout, call, call_async, torch_future_of
from arpc.compat.drop_in import DropIn
from arpc.compat.failures import as_torch_error, creation_error
from arpc.compat.loop_thread import refuse_loop_thread
from arpc.compat.passes import run_pass_from
from arpc.compat.workers import WorkerInfo
from arpc.errors import RRefCreationError, ShutdownError
from arpc.ids import address_of
from arpc.rref.calls import call_method
from arpc.rref.context import HandleClass
from arpc.rref.handle import RRef as Handle
from arpc.torchjit import ScriptModule
from arpc.user_errors import fresh

__all__ = ["HANDLE_CLASS", "RRef", "RRefProxy"]

# These classes and functions belong together, and use each other's private names
# ruff: noqa: SLF001

T = TypeVar("T")
S = TypeVar("S")


def _drop_in() -> DropIn:
    drop_in: DropIn = current.get_agent().drop_in
    return drop_in


class RRef(Generic[T]):
    """A reference to a value on some worker, its owner. ``RRef(value)`` makes one to an object of this process.

    Its methods block the thread that calls them; `handle` is the underlying `arpc.RRef`, for coroutines.
    """

    def __init__(self, value: T, type_hint: Any = None) -> None:
        if type_hint is None and isinstance(value, ScriptModule):
            raise RuntimeError(
                "The RRef being created contains a ScriptModule, must provide its ModuleInterface type hint. "
            )
        drop_in = _drop_in()
        self.handle: Handle[T] = drop_in.thread.caller_context().run(Handle, value, type_hint)
        self._prepare(drop_in)

    def _prepare(self, drop_in: DropIn | None) -> None:
        self._known_drop_in = drop_in
        self._type: torch.futures.Future[type] | None = None
        self._profiling_future: torch.futures.Future[Any] | None = None

    @classmethod
    def of(cls, handle: Handle[T], drop_in: DropIn | None = None) -> RRef[T]:
        """Wrap an RRef of arpc in the class that the code of this process uses."""
        made = cls.__new__(cls)
        made.handle = handle
        made._prepare(drop_in)
        return made

    @property
    def _drop_in(self) -> DropIn:
        # Not looked up when an RRef is unpacked: that is done on the loop, perhaps before there is an agent
        if self._known_drop_in is None:
            self._known_drop_in = _drop_in()
        return self._known_drop_in

    # -- the owner

    def owner(self) -> WorkerInfo:
        """Return the worker that has the value."""
        return WorkerInfo.of(self.handle.owner())

    def owner_name(self) -> str:
        return self.handle.owner_name()

    def is_owner(self) -> bool:
        """Whether the value is in this process."""
        return self.handle.is_owner()

    def confirmed_by_owner(self) -> bool:
        """Whether the owner is known to count this RRef."""
        return self.handle.confirmed_by_owner()

    def __str__(self) -> str:
        return repr(self.handle)

    __repr__ = __str__

    # -- the value

    def to_here(self, timeout: float = -1.0) -> T:
        """Return a copy of the value, once it exists; on the owner, the value itself."""
        refuse_loop_thread("await rref.handle.to_here()")
        self._refuse_if_over("call to_here() on it")
        return self._run(partial(self.handle.to_here, arpc_timeout(timeout)), timeout)

    def local_value(self) -> T:
        """Return the value itself. Raises RuntimeError if this worker is not the owner."""
        if not self.is_owner():
            rref, fork = self.handle.ids()
            raise RuntimeError(
                f"For UserRRef(rref_id={rref}, fork_id={fork}), can't call localValue() on user "
                f"{self._drop_in.info}. Call it on owner {self.owner()}"
            )
        refuse_loop_thread("await rref.handle.local_value()")
        return self._run(self.handle.local_value, -1.0)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run a backward pass from the value, on its owner."""
        run_pass_from(self._drop_in, self.handle, dist_autograd_ctx_id, retain_graph)

    def _run(self, make: Callable[[], Coroutine[Any, Any, S]], timeout: float) -> S:
        drop_in = self._drop_in
        try:
            return drop_in.run(make)
        except ShutdownError as error:
            raise RuntimeError(str(error)) from error
        except Exception as error:  # noqa: BLE001 - it is translated
            timeout_s = drop_in.agent.timeouts.default_s if timeout == -1.0 else timeout
            raised = as_torch_error(error, self.owner(), timeout_s)
        raise raised

    def _refuse_if_over(self, what: str) -> None:
        """Raise RuntimeError if the value is on another worker and this one was shut down."""
        if not self.is_owner() and self._drop_in.worker.is_shut_down:
            rref, fork = self.handle.ids()
            raise RuntimeError(
                f"UserRRef(rref_id={rref}, fork_id={fork}) has been deleted. Cannot {what} after deletion."
            )

    # -- calls on the value

    def rpc_sync(self, timeout: float = -1.0) -> RRefProxy:
        """``rref.rpc_sync().method(...)`` calls a method of the value on its owner, and returns the result."""
        return RRefProxy(self, RRef.rpc_sync, timeout)

    def rpc_async(self, timeout: float = -1.0) -> RRefProxy:
        """``rref.rpc_async().method(...)`` starts a call of a method of the value, and returns a future."""
        return RRefProxy(self, RRef.rpc_async, timeout)

    def remote(self, timeout: float = -1.0) -> RRefProxy:
        """``rref.remote().method(...)`` calls a method of the value, and returns an RRef to its result."""
        return RRefProxy(self, RRef.remote, timeout)

    # -- its type and creation

    def _get_type(self, timeout: float = -1.0, blocking: bool = True) -> Any:
        """Return the type of the value, or a future of it. The owner is asked once."""
        if self._type is None:
            self._type = self._ask_type(timeout)
        return self._type.wait() if blocking else self._type

    def _ask_type(self, timeout: float) -> torch.futures.Future[type]:
        ask: Callable[[RRef[T], float], torch.futures.Future[type]] = current.get_agent().type_of
        return ask(self, timeout)

    def _get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is done when the function that `remote` called has ended."""

        def watch() -> torch.futures.Future[Any]:
            creation: Future[Any] | None = self.handle._get_future()
            if creation is None:
                raise RuntimeError("Creating future for an RRef that was not created by rpc.remote() here")
            return torch_future_of(self._drop_in, creation, lambda error: as_torch_error(error, self.owner(), 0.0))

        return self._drop_in.thread.call(watch)

    def _get_profiling_future(self) -> torch.futures.Future[Any]:
        # arpc reports a creation to profiles before it completes the future
        return self._get_future() if self._profiling_future is None else self._profiling_future

    def _set_profiling_future(self, future: torch.futures.Future[Any]) -> None:
        self._profiling_future = future

    # -- pickles

    def _serialize(self) -> NoReturn:
        """Raise RuntimeError: an RRef is packed for one worker, and its owner counts it, so it has no other pickle."""
        self._check_creation()
        raise RuntimeError("Can not pickle rref in python pickler, rref can only be pickled when using RPC")

    def _check_creation(self) -> None:
        failure = self.handle.failure
        if isinstance(failure, RRefCreationError):
            raise creation_error()

    def __reduce__(self) -> NoReturn:
        self._refuse_if_over("call fork an UserRRef")
        raise RuntimeError("Can not pickle rref in python pickler, rref can only be pickled when using RPC")


class RRefProxy:
    """Calls methods of an RRef's value by name, with one of `rpc_sync`, `rpc_async` and `remote`."""

    def __init__(self, rref: RRef[Any], rpc_api: Callable[..., Any], timeout: float = -1.0) -> None:
        self.rref = rref
        self.rpc_api = rpc_api
        self.rpc_timeout = timeout

    def __getattr__(self, func_name: str) -> Callable[..., Any]:
        return partial(_INVOKE[self.rpc_api.__name__], self.rref, func_name, self.rpc_timeout)


def _arguments(rref: RRef[Any], name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    rref._check_creation()
    return (*rref.handle.target(), name, *args)


def _invoke_sync(rref: RRef[Any], name: str, timeout: float, /, *args: Any, **kwargs: Any) -> Any:
    """Call a method, wait for its result, and return it."""
    drop_in = rref._drop_in
    peer = drop_in.peer(address_of(rref.handle.owner()))
    called = rref.handle.name_of_method(name)
    return call(drop_in, peer, call_method, _arguments(rref, name, args), kwargs, timeout, called)


def _invoke_async(rref: RRef[Any], name: str, timeout: float, /, *args: Any, **kwargs: Any) -> Any:
    """Start a call of a method; return the future of its result."""
    drop_in = rref._drop_in
    peer = drop_in.peer(address_of(rref.handle.owner()))
    called = rref.handle.name_of_method(name)
    arguments = _arguments(rref, name, args)
    return call_async(drop_in, peer, call_method, arguments, kwargs, timeout, anchor=rref, name=called)


def _invoke_remote(rref: RRef[Any], name: str, timeout: float, /, *args: Any, **kwargs: Any) -> RRef[Any]:
    """Call a method whose result stays on the owner; return an RRef to it."""
    rref._check_creation()
    getattr(rref._get_type(timeout), name)  # raises AttributeError at once for a wrong name
    context = rref._drop_in.thread.caller_context()
    made = context.run(rref.handle._remote_method, name, arpc_timeout(timeout), *args, **kwargs)
    return RRef.of(made, rref._drop_in)


_INVOKE: Final[dict[str, Callable[..., Any]]] = {
    "rpc_sync": _invoke_sync,
    "rpc_async": _invoke_async,
    "remote": _invoke_remote,
}


def _sendable(rref: RRef[Any]) -> Handle[Any]:
    """Return the handle to pack in a call. Raises the creation error if the value may not exist."""
    failure = rref.handle.failure
    if isinstance(failure, RRefCreationError):
        raise fresh(failure)
    return rref.handle


HANDLE_CLASS = HandleClass(RRef, RRef.of, _sendable)
