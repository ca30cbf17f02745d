"""Profiling keys: the names of profiled calls, and the key of the call that is being made."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Final

from arpc.agent.hooks.observers import Kind, Outgoing
from arpc.agent.server.functions import name_of
from arpc.errors import ProfilerError
from arpc.ids import IdAllocator
from arpc.torchjit import ScriptFunction, find_builtin

__all__ = ["REMOTE_OP", "RemoteProfilerManager", "call_key", "function_name"]

REMOTE_OP: Final = "#remote_op: "
"""The separator between the key of a call and the name of an operator that it ran."""

_current_key: ContextVar[str | None] = ContextVar("arpc.profiler.key", default=None)


class RemoteProfilerManager:
    """The profiling keys of one worker: the key of the call that is being made, and those of calls in flight.

    The current key is a context variable. Concurrent tasks on a loop do not see each other's key; it survives awaits,
    and child tasks and threads started with `arpc.to_thread` inherit it.

    >>> manager = RemoteProfilerManager(worker_id=1)
    >>> manager.set_current_key("rpc_async#add(a -> b)")
    >>> manager.save_key(manager.next_id(), manager.current_key())
    >>> manager.unset_current_key()
    """

    def __init__(self, worker_id: int = 0) -> None:
        self._ids = IdAllocator(worker_id)
        self._keys: dict[int, str] = {}

    def set_current_key(self, key: str) -> None:
        """Set the key of the next call. Raises `ProfilerError` if one is set already: unset it first."""
        if (known := _current_key.get()) is not None:
            raise ProfilerError(f"the current profiling key is {known!r} already: unset it before setting {key!r}")
        _current_key.set(key)

    def is_current_key_set(self) -> bool:
        return _current_key.get() is not None

    def unset_current_key(self) -> None:
        _current_key.set(None)

    def current_key(self) -> str:
        """Return the current key. Raises `ProfilerError` if there is none."""
        key = _current_key.get()
        if key is None:
            raise ProfilerError("there is no current profiling key: set one first")
        return key

    def next_id(self) -> int:
        """Return an id that no other profiled call of the group has: ``worker << 48``, and counting up."""
        return self._ids.next_number()

    def save_key(self, profiling_id: int, key: str) -> None:
        """Store the key of a call in flight. The first key for an id is kept."""
        self._keys.setdefault(profiling_id, key)

    def key_of(self, profiling_id: int) -> str:
        """Return the key of a call in flight. Raises `ProfilerError` if it has none."""
        try:
            return self._keys[profiling_id]
        except KeyError:
            raise ProfilerError(f"no profiled call {profiling_id} is under way here") from None

    def erase_key(self, profiling_id: int) -> None:
        """Remove the key of a call that has ended. Raises `ProfilerError` if it has none."""
        if self._keys.pop(profiling_id, None) is None:
            raise ProfilerError(f"no profiled call {profiling_id} is under way here")

    def __len__(self) -> int:
        return len(self._keys)


def function_name(function: Any) -> str:
    """Return the name of a function in profiles: for an operator of torch, such as ``aten::add``.

    A script function is named with its module. A string, such as the name of a method of a remote value, is returned
    unchanged.
    """
    if isinstance(function, str):
        return function
    if isinstance(function, ScriptFunction):
        return str(function.qualified_name)
    try:
        builtin = find_builtin(function)
    except TypeError:  # a callable that cannot be looked up
        builtin = None
    return builtin or name_of(function)


def call_key(request: Outgoing, caller: str) -> str:
    """Return the name of a request in profiles."""
    if request.kind is Kind.FETCH:
        return f"to_here#({caller})->({request.peer.name})"
    if request.kind is Kind.BACKWARD:
        return f"gradients#({caller})->({request.peer.name})"
    if request.kind is Kind.CALL:
        mode = "rpc_sync" if request.is_awaited else "rpc_async"
        if isinstance(request.target, ScriptFunction):
            mode = "rpc_async_jit"
    else:
        mode = request.kind.value
    return f"{mode}#{function_name(request.target)}({caller} -> {request.peer.name})"
