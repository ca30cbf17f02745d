"""RRefs in pickles: each RRef that leaves a worker becomes a new fork for its receiver."""

from __future__ import annotations

from typing import Any

from arpc.agent.scope import current_scope
from arpc.errors import SerializationError
from arpc.ids import WorkerInfo, creator_of
from arpc.rref.context import RRefContext
from arpc.rref.handle import RRef
from arpc.wire.values.allowlist import allow_function
from arpc.wire.values.checked_functions import FLAG, NUMBER, WORKER_ID, WORKER_NAME
from arpc.wire.values.pickler import Pickling

__all__ = ["bare", "reduce_rref"]


def reduce_rref(context: RRefContext, rref: RRef[Any], pickling: Pickling) -> tuple[Any, ...]:
    """Pack an RRef for a worker, which gets a new fork. The fork is offered once the pickle is complete."""
    return _rebuild, rref.pack(context, pickling)


@allow_function(WORKER_NAME, WORKER_ID, NUMBER, NUMBER, WORKER_NAME, FLAG)
def _rebuild(owner_name: str, owner_id: int, rref: int, fork: int, parent: str, is_created: bool) -> Any:
    """Unpack an RRef, in the context of the worker that received it."""
    scope = current_scope.get()
    if scope is None or scope.worker is None:
        raise SerializationError("an RRef can be unpickled by a worker that received it in a call, and nowhere else")
    context: RRefContext = scope.worker.rref_context
    owner = context.identified(WorkerInfo(owner_name, owner_id))
    # the fork's id contains the id of the worker that made it: the sender
    held = context.receive(rref, fork, owner, WorkerInfo(parent, creator_of(fork)), is_created=is_created)
    made: RRef[Any] = RRef.of(context, held)
    return made if context.handle_class is None else context.handle_class.wrap(made)


def bare(handle: Any) -> RRef[Any]:
    """Return the RRef itself for an RRef or an object of the worker's `HandleClass`. Raises TypeError for others."""
    if isinstance(handle, RRef):
        return handle
    scope = current_scope.get()
    handle_class = scope.worker.rref_context.handle_class if scope is not None and scope.worker is not None else None
    if handle_class is None or not isinstance(handle, handle_class.cls):
        raise TypeError(f"an RRef is needed here, not {type(handle).__qualname__}")
    unwrapped: RRef[Any] = handle_class.unwrap(handle)
    return unwrapped
