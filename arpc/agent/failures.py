"""Exceptions on their way home: what a handler raised becomes what the caller sees.

The payload holds the pickled exception apart from its description, so that one which cannot be pickled, or cannot be
rebuilt at the other end, still tells its type, text and stack.
"""

from __future__ import annotations

import asyncio
import traceback
from typing import Any, Final

from arpc.errors import (
    CallCancelledError,
    OverloadedError,
    ProtocolError,
    RemoteError,
    RemoteTraceback,
    RpcTimeoutError,
    ShutdownError,
    WorkerLostError,
)
from arpc.ids import WorkerInfo
from arpc.wire.messages import FailureKind
from arpc.wire.pickling import Pickler
from arpc.wire.policy import Policy
from arpc.wire.tensors import Slot

__all__ = ["describe_failure", "rebuild_failure"]

_RUNTIME: Final = ("arpc.agent.", "arpc.rref.", "arpc.torchstate.")

# What would stop the caller's own loop or coroutine if it were raised there
_NOT_TO_BE_RAISED: Final = (
    KeyboardInterrupt,
    SystemExit,
    GeneratorExit,
    StopIteration,
    StopAsyncIteration,
    asyncio.CancelledError,
)


def describe_failure(
    error: BaseException, pickler: Pickler, *, main_by_value: bool, to: WorkerInfo | None = None
) -> tuple[bytes, list[Slot]]:
    """Payload and slots of a FAILURE."""
    pickled: bytes | None = None
    slots: list[Slot] = []
    if not isinstance(error, _NOT_TO_BE_RAISED):
        try:
            pickled, slots = pickler.dumps(error, main_by_value=main_by_value, to=to)
        except BaseException:  # noqa: BLE001 - a user's __reduce__ may raise anything; the description is sent instead
            slots = []
    stack = "".join(traceback.format_exception(_without_runtime_frames(error)))
    return pickler.dumps((pickled, _type_name(error), _text(error), stack))[0], slots


def rebuild_failure(
    kind: int,
    payload: bytes | bytearray | memoryview,
    slots: list[Any],
    sender: WorkerInfo,
    function: str,
    policy: Policy,
) -> Exception:
    """The exception a caller sees. Raises `ProtocolError`, or what unpickling raises, if it is not one of ours."""
    worker = sender.name
    pickled, type_name, text, stack = policy.read(payload, [], sender)
    if not all(type(part) is str for part in (type_name, text, stack)):
        raise ProtocolError("a failure that is not described by texts")
    if kind == FailureKind.TIMEOUT:
        return _caused(RpcTimeoutError(f"{function} on worker {worker!r} ran past its deadline"), worker, stack)
    if kind == FailureKind.CANCELLED:
        return _caused(CallCancelledError(f"{function} was cancelled on worker {worker!r}"), worker, stack)
    if kind == FailureKind.OVERLOADED:
        return OverloadedError(f"worker {worker!r} refused {function}: {text}")
    if kind == FailureKind.SHUTDOWN:
        return ShutdownError(f"worker {worker!r} is shutting down and did not run {function}")
    if kind == FailureKind.LEFT:
        text = f"worker {worker!r} has left: it was shut down while {function} ran"
        return _caused(WorkerLostError(text, worker), worker, stack)
    if pickled is not None:
        try:
            error = policy.read(pickled, slots, sender)
        except BaseException:  # noqa: BLE001 - a user's __reduce__ may raise anything; the description is sent instead
            error = None
        if isinstance(error, Exception) and not isinstance(error, _NOT_TO_BE_RAISED):
            return _caused(error, worker, stack)
    return _caused(RemoteError(type_name, text, stack, worker), worker, stack)


def _caused(error: Exception, worker: str, stack: str) -> Exception:
    error.__cause__ = RemoteTraceback(worker, stack)
    return error


def _type_name(error: BaseException) -> str:
    cls = type(error)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as reason:  # noqa: BLE001 - a user's __str__ may raise anything
        return f"<its __str__ raised {type(reason).__qualname__}>"


def _without_runtime_frames(error: BaseException) -> BaseException:
    """Cut the frames of the runtime above the user's function off the traceback: they explain nothing."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(_RUNTIME):
        trace = trace.tb_next
    return error.with_traceback(trace) if trace is not None else error
