"""Exceptions on their way home: what a handler raised becomes what the caller sees.

The payload holds the pickled exception apart from its description, so that one which cannot be pickled, or cannot be
rebuilt at the other end, still tells its type, text and stack.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any, Final

from arpc.errors import (
    CallCancelledError,
    OverloadedError,
    RemoteError,
    RemoteTraceback,
    RpcTimeoutError,
    ShutdownError,
    WorkerLostError,
)
from arpc.ids import WorkerInfo
from arpc.user_errors import (
    MAX_TEXT,
    can_be_raised,
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
from arpc.wire.pickling import Pickler, loads
from arpc.wire.tensors import Slot

__all__ = ["describe_failure", "raisable", "rebuild_failure"]

_RUNTIME: Final = ("arpc.agent.", "arpc.rref.", "arpc.torchstate.")

# A text and a stack, each of a 16th of the bytes there are, take half of them: a character takes up to four bytes
_TEXT_PART: Final = 16

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
    error: BaseException,
    pickler: Pickler | None,
    *,
    main_by_value: bool,
    to: WorkerInfo | None = None,
    max_bytes: int | None = None,
) -> tuple[bytes, list[Slot]]:
    """Payload and slots of a FAILURE, whatever the error is. Never raises.

    The error is described, and not sent itself, if it takes more than ``max_bytes`` or there is no pickler.
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
    worker: str,
    function: str,
    loads: Callable[[bytes | bytearray | memoryview, list[Any]], Any] = loads,
) -> Exception:
    """The exception a caller sees. ``loads`` reads pickles."""
    pickled, type_name, text, stack = loads(payload, [])
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
            error = loads(pickled, slots)
        except BaseException:  # noqa: BLE001 - a user's __reduce__ may raise anything; the description is sent instead
            error = None
        if is_a(error, Exception) and can_be_raised(error) and not is_a(error, _NOT_TO_BE_RAISED):
            return _caused(error, worker, stack)
    return _caused(RemoteError(type_name, text, stack, worker), worker, stack)


def raisable(error: BaseException, worker: str) -> Exception:
    """What may be kept, and raised any number of times in any code of this worker, for an error of a handler.

    That is the error itself if it can be copied: each use raises a copy, since an exception keeps the frames of all who
    raise it. An error that cannot be copied, or that would end a coroutine, a task or the process, or that works
    against the code that catches it, is described by a `RemoteError`, as it is for other workers.
    """
    is_ordinary = is_a(error, Exception) and can_be_raised(error) and not is_a(error, _NOT_TO_BE_RAISED)
    if is_ordinary and fresh(error) is not error:
        return error  # type: ignore[return-value]  # it is an Exception
    stack = stack_of(_without_runtime_frames(error))
    return RemoteError(type_name_of(error, with_module=True), text_of(error), stack, worker)


def _caused(error: Exception, worker: str, stack: str) -> Exception:
    return set_cause(error, RemoteTraceback(worker, stack))


def _without_runtime_frames(error: BaseException) -> BaseException:
    """Cut the frames of the runtime above the user's function off the traceback: they explain nothing."""
    trace = traceback_of(error)
    while trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith(_RUNTIME):
        trace = trace.tb_next
    return with_traceback(error, trace) if trace is not None else error
