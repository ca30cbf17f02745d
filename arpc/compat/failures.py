"""Translates errors of arpc into those of torch.distributed.rpc, whose texts programs match on."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from arpc.agent.server.remote_exceptions import is_of_handler
from arpc.errors import (
    ArpcError,
    CallCancelledError,
    RemoteError,
    RemoteTraceback,
    RpcTimeoutError,
    RRefCreationError,
    SerializationError,
)
from arpc.ids import WorkerInfo
from arpc.torchjit import find_builtin
from arpc.user_errors import can_be_raised, cause_of, repr_of, set_cause, text_of, type_name_of

__all__ = ["as_torch_error", "creation_error", "packing_error", "timeout_error"]

_NO_SCHEMA: Final = "Overloaded torch operator invoked from Python failed to match any schema"
_NOT_ON_CALLEE: Final = " is not on worker "


def timeout_error(timeout_s: float) -> RuntimeError:
    """Return the error of a call that took too long."""
    milliseconds = int(timeout_s * 1000)
    return RuntimeError(
        f"RPCErr:1:RPC ran for more than set timeout ({milliseconds} ms) and will now be marked with an error"
    )


def creation_error() -> RuntimeError:
    """Return the error of every use of an RRef whose creation is not known to have succeeded."""
    return RuntimeError(
        "RRef creation via rpc.remote() timed out, and it is possible that the RRef on the owner node does not exist."
    )


def as_torch_error(error: BaseException, to: WorkerInfo, timeout_s: float, function: Any = None) -> BaseException:
    """Return the error that torch raises where arpc raised ``error`` in a call to worker ``to``."""
    if isinstance(error, asyncio.CancelledError):
        return RuntimeError(f"the call of worker {to.name} was cancelled")
    remote = cause_of(error)
    if isinstance(error, RemoteError):
        made = RuntimeError(
            f"Failed to create original exception type. Original exception on remote side was "
            f"{_described(error, to, error.stack)}"
        )
    elif isinstance(error, RpcTimeoutError) and not is_of_handler(error):
        made = timeout_error(timeout_s)
    elif isinstance(error, RRefCreationError):
        made = creation_error()
    elif isinstance(error, CallCancelledError) and not is_of_handler(error):
        made = RuntimeError(str(error))
    elif isinstance(remote, RemoteTraceback) and _is_operator(function):
        # torch runs operators without Python, so all their errors are RuntimeErrors
        reason = f"{_NO_SCHEMA}: {text_of(error)}" if isinstance(error, TypeError) else text_of(error)
        made = RuntimeError(f"On {to!r}:\n{reason}\n{remote.stack}")
    elif isinstance(remote, RemoteTraceback):
        return _rebuilt(error, to, remote.stack)
    elif isinstance(error, ArpcError) and not isinstance(error, RuntimeError | TypeError | ValueError):
        made = RuntimeError(str(error))
    else:
        return error
    made.__cause__ = error
    return made


def packing_error(error: Exception, to: WorkerInfo) -> BaseException:
    """Return the error that torch raises if the arguments of a call cannot be pickled: the pickler's own error."""
    reason = error.__cause__
    if isinstance(error, SerializationError) and isinstance(reason, Exception):
        return reason
    return as_torch_error(error, to, 0.0)


def _is_operator(function: Any) -> bool:
    return function is not None and find_builtin(function) is not None


def _described(error: BaseException, to: WorkerInfo, stack: str) -> str:
    return f"On {to!r}:\n{repr_of(error)}\n{stack}"


def _rebuilt(error: BaseException, to: WorkerInfo, stack: str) -> BaseException:
    """Return an exception of the same type whose text has the worker and the stack where it was raised."""
    if isinstance(error, SerializationError):
        hint = ". Default RPC pickler does not serialize function code" if _NOT_ON_CALLEE in str(error) else ""
        made: BaseException = RuntimeError(f"On {to!r}:\n{error}{hint}\n{stack}")
    else:
        text = _described(error, to, stack).encode("utf-8").decode("unicode_escape")
        try:
            made = type(error)(text)
            if not can_be_raised(made):
                raise TypeError(f"its class makes a {type_name_of(made)}")
        except BaseException as reason:  # noqa: BLE001 - the class is a user's, and may do anything
            made = RuntimeError(
                f"Failed to create original exception type. Error msg was {text_of(reason)} "
                f"Original exception on remote side was {text}"
            )
    return set_cause(made, error)
