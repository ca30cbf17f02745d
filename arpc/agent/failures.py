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
    not_run,
    set_may_have_run,
)
from arpc.ids import WorkerInfo
from arpc.wire.messages import FailureKind
from arpc.wire.pickling import Pickler
from arpc.wire.policy import Policy
from arpc.wire.tensors import Slot

__all__ = ["describe_failure", "is_of_handler", "rebuild_failure"]

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
        text = f"{function} on worker {worker!r} ran past its deadline"
        return _caused(RpcTimeoutError(text), worker, stack, is_of_handler=False)
    if kind == FailureKind.CANCELLED:
        text = f"{function} was cancelled on worker {worker!r}"
        return _caused(CallCancelledError(text), worker, stack, is_of_handler=False)
    if kind == FailureKind.OVERLOADED:
        return not_run(OverloadedError(f"worker {worker!r} refused {function}: {text}"))
    if kind == FailureKind.SHUTDOWN:
        return not_run(ShutdownError(f"worker {worker!r} is shutting down and did not run {function}"))
    if kind == FailureKind.LEFT:
        text = f"worker {worker!r} has left: it was shut down while {function} ran"
        return _caused(WorkerLostError(text, worker), worker, stack, is_of_handler=False)
    may_have_run = kind != FailureKind.REFUSED
    if pickled is not None:
        try:
            error = policy.read(pickled, slots, sender)
        except BaseException:  # noqa: BLE001 - a user's __reduce__ may raise anything; the description is sent instead
            error = None
        if isinstance(error, Exception) and not isinstance(error, _NOT_TO_BE_RAISED):
            # What it says of a call that the handler made says nothing of the call of the handler.
            set_may_have_run(error, may_have_run)
            return _caused(error, worker, stack)
    unknown = RemoteError(type_name, text, stack, worker)
    unknown.may_have_run = may_have_run
    return _caused(unknown, worker, stack)


def is_of_handler(error: BaseException) -> bool:
    """Whether a handler raised the error of a call. Then it says nothing of the worker that was called."""
    cause = error.__cause__
    return isinstance(cause, RemoteTraceback) and cause.is_of_handler


def _caused(error: Exception, worker: str, stack: str, *, is_of_handler: bool = True) -> Exception:
    error.__cause__ = cause = RemoteTraceback(worker, stack)
    if not is_of_handler:
        cause.is_of_handler = False
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
