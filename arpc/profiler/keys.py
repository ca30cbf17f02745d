"""Names of profiled calls, and which one is being made."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Final

import torch
from torch._jit_internal import _qualified_name
from torch.jit._builtins import _find_builtin

from arpc.agent.observers import Kind, Outgoing
from arpc.agent.server.functions import name_of
from arpc.errors import ProfilerError
from arpc.ids import IdAllocator

__all__ = ["REMOTE_OP", "RemoteProfilerManager", "call_key", "function_name"]

REMOTE_OP: Final = "#remote_op: "
"""Between the key of a call and the name of an operator that it ran."""

_current_key: ContextVar[str | None] = ContextVar("arpc.profiler.key", default=None)


class RemoteProfilerManager:
    """The profiling keys of one worker: the key of the call that is being made, and those of calls under way.

    The current key is a context variable. Tasks that take turns on a loop do not see each other's; it survives awaits,
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
        """Name the call that is made next. `ProfilerError` if another is named already: unset that first."""
        if (known := _current_key.get()) is not None:
            raise ProfilerError(f"the current profiling key is {known!r} already: unset it before setting {key!r}")
        _current_key.set(key)

    def is_current_key_set(self) -> bool:
        return _current_key.get() is not None

    def unset_current_key(self) -> None:
        _current_key.set(None)

    def current_key(self) -> str:
        """The current key; `ProfilerError` if there is none."""
        key = _current_key.get()
        if key is None:
            raise ProfilerError("there is no current profiling key: set one first")
        return key

    def next_id(self) -> int:
        """An id that no other profiled call of the group has: ``worker << 48``, and counting up."""
        return self._ids.next_number()

    def save_key(self, profiling_id: int, key: str) -> None:
        """Remember the key of a call under way. The first one for an id stays."""
        self._keys.setdefault(profiling_id, key)

    def key_of(self, profiling_id: int) -> str:
        """The key of a call under way; `ProfilerError` if it has none."""
        try:
            return self._keys[profiling_id]
        except KeyError:
            raise ProfilerError(f"no profiled call {profiling_id} is under way here") from None

    def erase_key(self, profiling_id: int) -> None:
        """Forget the key of a call that has ended; `ProfilerError` if it has none."""
        if self._keys.pop(profiling_id, None) is None:
            raise ProfilerError(f"no profiled call {profiling_id} is under way here")

    def __len__(self) -> int:
        return len(self._keys)


def function_name(function: Any) -> str:
    """How profiles name a function: an operator of torch as ``aten::add``, a script function with its module.

    A name, as that of a method of a remote value, stands for itself.
    """
    if isinstance(function, str):
        return function
    if isinstance(function, torch.jit.ScriptFunction):
        return str(_qualified_name(function))
    try:
        builtin = _find_builtin(function)  # type: ignore[no-untyped-call]
    except TypeError:  # it cannot be looked up
        builtin = None
    return builtin or name_of(function)


def call_key(request: Outgoing, caller: str) -> str:
    """What a profile calls a request."""
    if request.kind is Kind.FETCH:
        return f"to_here#({caller})->({request.peer.name})"
    if request.kind is Kind.BACKWARD:
        return f"gradients#({caller})->({request.peer.name})"
    if request.kind is Kind.CALL:
        mode = "rpc_sync" if request.is_awaited else "rpc_async"
        if isinstance(request.target, torch.jit.ScriptFunction):
            mode = "rpc_async_jit"
    else:
        mode = request.kind.value
    return f"{mode}#{function_name(request.target)}({caller} -> {request.peer.name})"
