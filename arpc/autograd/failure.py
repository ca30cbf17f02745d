"""The errors of failed backward passes, which help to find the node: its worker, and where its forward ran."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from types import TracebackType
from typing import Any, Final

from arpc.errors import (
    ArpcError,
    AutogradError,
    BackwardError,
    CallCancelledError,
    RpcTimeoutError,
    ShutdownError,
    WorkerLostError,
)
from arpc.ids import WorkerInfo
from arpc.user_errors import is_a, set_cause, summary_of, text_of, traceback_of

__all__ = ["node_failure", "peer_failure"]

# The name of the node in torch's own errors
_NAMED: Final = re.compile(r"Function '?(\w+Backward\w*)'?")


def node_failure(error: BaseException, worker: WorkerInfo, context_id: int, last_begun: Any) -> Exception:
    """Return the error of a pass for an exception that was raised while its nodes ran.

    ``last_begun``: the node that ran, which is known in anomaly mode; else None.
    """
    if is_a(error, ArpcError):
        return error  # type: ignore[return-value]  # it is one of ours
    name = stack = ""
    with suppress(BaseException):  # objects in a user's frames are the user's, and may raise anything
        node = last_begun if last_begun is not None else _node_in(traceback_of(error))
        name = str(node.name()) if node is not None else _name_in(error)
        stack = _forward_stack(node)
    where = f"node {name}" if name else "a node (anomaly mode would tell which)"
    text = (
        f"the backward pass of autograd context {context_id} failed on worker {worker.name!r} (Error on Node "
        f"{worker.id}) in {where}: {summary_of(error)}"
    )
    if stack:
        text += f"\nIts forward ran on worker {worker.name!r} here:\n{stack}"
    failure = BackwardError(text, worker.name, worker.id, name, stack, text_of(error), (worker.id,))
    return set_cause(failure, error)


def peer_failure(error: BaseException, me: int, context_id: int, peer: str) -> BaseException:
    """Return the failure of a pass on worker ``me`` whose parcel a peer has not answered."""
    what = f"the backward pass of autograd context {context_id}"
    made: Exception
    if isinstance(error, BackwardError):  # errors of peers are safe to inspect
        error.path = (me, *error.path)
        return error
    if text_of(error).startswith(what):
        return error
    if isinstance(error, WorkerLostError):
        made = WorkerLostError(f"{what} failed: {error}", error.worker or peer)
    elif isinstance(error, ShutdownError):
        made = WorkerLostError(f"{what} failed: worker {peer!r} is shutting down", peer)
    elif isinstance(error, RpcTimeoutError):
        made = RpcTimeoutError(f"{what} did not end in time: worker {peer!r} had not answered")
    elif isinstance(error, asyncio.CancelledError | CallCancelledError):
        made = AutogradError(f"{what} was ended on worker {peer!r}")
    else:
        return error
    made.__cause__ = error
    return made


def _node_in(trace: TracebackType | None) -> Any:
    """Return the node whose ``backward``, written in Python, raised: its first argument is the node itself."""
    found: Any = None
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name in {"backward", "vjp"} and code.co_argcount:
            candidate = trace.tb_frame.f_locals.get(code.co_varnames[0])
            if hasattr(candidate, "next_functions"):
                found = candidate
        trace = trace.tb_next
    return found


def _name_in(error: BaseException) -> str:
    match = _NAMED.search(text_of(error))
    return match[1] if match is not None else ""


def _forward_stack(node: Any) -> str:
    """Return the stack of a node's forward. Torch keeps it only if anomaly mode was on when the node was made."""
    metadata = getattr(node, "metadata", None) or {}
    return "".join(metadata.get("traceback_", ()))
