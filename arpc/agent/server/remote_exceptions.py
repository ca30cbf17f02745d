"""Sends the exception of a handler to the caller, and rebuilds it there.

The payload holds the pickled exception apart from its description. So an exception that cannot be pickled, or that the
caller cannot rebuild, still shows its type, text and stack.
"""

from __future__ import annotations

import asyncio
import pickle
from typing import Any, Final

from arpc.errors import (
    CallCancelledError,
    OverloadedError,
    ProtocolError,
    RemoteError,
    RemoteTraceback,
    RpcTimeoutError,
    SerializationError,
    ShutdownError,
    WorkerLostError,
    not_run,
    set_may_have_run,
)
from arpc.ids import WorkerInfo
from arpc.user_errors import (
    MAX_TEXT,
    can_be_raised,
    cause_of,
    fresh,
    is_a,
    set_cause,
    stack_of,
    text_of,
    traceback_of,
    type_name_of,
    with_traceback,
)
from arpc.wire.messages import FailureKind
from arpc.wire.values.packing import Slot
from arpc.wire.values.pickler import Pickler
from arpc.wire.values.policy import Policy

__all__ = ["NOT_THERE", "describe_failure", "is_of_handler", "raisable", "rebuild_failure"]

NOT_THERE: Final = "the function is not on worker "
"""The beginning of the error of a callee that does not have the function that it should call."""

_RUNTIME: Final = ("arpc.agent.", "arpc.rref.", "arpc.torchstate.")

# The text and the stack may each have a 16th of the limit as characters, in total half of it in bytes: up to 4 each
_TEXT_PART: Final = 16

# Exceptions that would stop the caller's own loop or coroutine if they were raised there
_NOT_TO_BE_RAISED: Final = (
    KeyboardInterrupt,
    SystemExit,
    GeneratorExit,
    StopIteration,
    StopAsyncIteration,
    asyncio.CancelledError,
)


def describe_failure(
    error: BaseException,
    pickler: Pickler | None,
    *,
    main_by_value: bool,
    to: WorkerInfo | None = None,
    max_bytes: int | None = None,
) -> tuple[bytes, list[Slot]]:
    """Return the payload and the slots of a FAILURE for any error. Never raises.

    Only a description is sent if the error itself would take more than ``max_bytes``, or if there is no pickler.
    """
    pickled: bytes | None = None
    slots: list[Slot] = []
    limit = MAX_TEXT if max_bytes is None else min(MAX_TEXT, max_bytes // _TEXT_PART)
    if pickler is not None and can_be_raised(error) and not is_a(error, _NOT_TO_BE_RAISED):
        try:
            pickled, slots = pickler.dumps(error, main_by_value=main_by_value, to=to)
        except BaseException:  # noqa: BLE001 - a user's __reduce__ may raise anything; the description is sent instead
            slots = []
        if pickled is not None and max_bytes is not None and len(pickled) > max_bytes - 9 * limit:
            pickled, slots = None, []
    stack = stack_of(_without_runtime_frames(error), limit)
    description = (pickled, type_name_of(error, with_module=True), text_of(error, limit), stack)
    return pickle.dumps(description, protocol=5), slots


def rebuild_failure(
    kind: int,
    payload: bytes | bytearray | memoryview,
    slots: list[Any],
    sender: WorkerInfo,
    function: str,
    policy: Policy,
    timeout_s: float = 0.0,
) -> Exception:
    """Return the exception for the caller. Raises `ProtocolError`, or an unpickling error, if it is malformed."""
    worker = sender.name
    pickled, type_name, text, stack = policy.read(payload, [], sender)
    if not all(type(part) is str for part in (type_name, text, stack)):
        raise ProtocolError("a failure that is not described by texts")
    if kind == FailureKind.TIMEOUT:
        after = f" after {timeout_s:g} s" if timeout_s else ""
        text = f"{function} on worker {worker!r} ran past its deadline{after}"
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
        except BaseException:  # noqa: BLE001 - a user's __reduce__ may raise anything; the description is used instead
            error = None
        if is_a(error, Exception) and can_be_raised(error) and not is_a(error, _NOT_TO_BE_RAISED):
            # Its own `may_have_run` is about a call that the handler made, and not about the call of the handler.
            set_may_have_run(error, may_have_run)
            if not may_have_run and type(error) is SerializationError:
                error = not_run(SerializationError(_naming(function, str(error))))
            return _caused(error, worker, stack)
    unknown = RemoteError(type_name, text, stack, worker)
    unknown.may_have_run = may_have_run
    return _caused(unknown, worker, stack)


def _naming(function: str, text: str) -> str:
    """Add the name of the function to a callee's error about a call that it could not read."""
    if text.startswith(NOT_THERE):
        return f"{function} {text.removeprefix('the function ')}"
    return text.replace("cannot unpack the call:", f"cannot unpack the call of {function}:", 1)


def is_of_handler(error: BaseException) -> bool:
    """Return whether a handler raised the error of a call, which then says nothing about the worker that was called."""
    cause = cause_of(error)
    return type(cause) is RemoteTraceback and cause.is_of_handler


def raisable(error: BaseException, worker: str) -> Exception:
    """Return an exception for a handler's error that this worker can keep, and raise any number of times in any code.

    It is the error itself if it can be copied: each use raises a copy, since an exception keeps the frames of all code
    that raises it. An error that cannot be copied, that would end a coroutine, a task or the process, or that
    interferes with the code that catches it is described by a `RemoteError`, as it is for other workers.
    """
    is_ordinary = is_a(error, Exception) and can_be_raised(error) and not is_a(error, _NOT_TO_BE_RAISED)
    if is_ordinary and fresh(error) is not error:
        return error  # type: ignore[return-value]  # it is an Exception
    stack = stack_of(_without_runtime_frames(error))
    return RemoteError(type_name_of(error, with_module=True), text_of(error), stack, worker)


def _caused(error: Exception, worker: str, stack: str, *, is_of_handler: bool = True) -> Exception:
    cause = RemoteTraceback(worker, stack)
    if not is_of_handler:
        cause.is_of_handler = False
    return set_cause(error, cause)


def _without_runtime_frames(error: BaseException) -> BaseException:
    """Cut the frames of the runtime above the user's function off the traceback: they explain nothing."""
    trace = traceback_of(error)
    while trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith(_RUNTIME):
        trace = trace.tb_next
    return with_traceback(error, trace) if trace is not None else error
