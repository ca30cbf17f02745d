"""RRefs in pickles: each that leaves a worker is a fork for the one it goes to."""

from __future__ import annotations

from typing import Any

from arpc.agent.scope import current_scope
from arpc.errors import SerializationError
from arpc.ids import WorkerInfo, creator_of
from arpc.rref.context import RRefContext
from arpc.rref.handle import RRef
from arpc.rref.states import OwnerState
from arpc.wire.values.allowlist import trust
from arpc.wire.values.pickler import Parcel
from arpc.wire.values.trusted import FLAG, NUMBER, WORKER_ID, WORKER_NAME

__all__ = ["bare", "reduce_rref"]

# The two halves of what is `__reduce__` for other classes, so they may look into a handle
# ruff: noqa: SLF001


def reduce_rref(context: RRefContext, rref: RRef[Any], parcel: Parcel) -> tuple[Any, ...]:
    """Pack an RRef for a worker: it gets a fork of its own, which counts once the pickle is complete."""
    to = parcel.to
    if to is None:
        rref.__reduce__()
    if rref._context is not context:
        holder, sender = rref._context.info.name, context.info.name
        raise SerializationError(f"{rref!r} belongs to worker {holder!r} and cannot be sent by worker {sender!r}")
    rref._check("forks made")
    number, fork = rref._rref, context.ids.next_number()
    use, value = rref._use, rref._value
    if use is not None:
        is_created = use.is_created
        parcel.packed.append(lambda: context.on_loop(lambda: context.offer(number, fork, to, use.fork)))
    else:
        assert value is not None
        owned = context.forks.owned.get(number)
        is_created = owned is None or owned.state is not OwnerState.EXPECTED

        def share_and_offer() -> None:
            context.share(number, value)
            context.offer(number, fork, to, None)

        parcel.packed.append(lambda: context.on_loop(share_and_offer))
    owner = rref.owner()
    return _rebuild, (owner.name, owner.id, number, fork, context.info.name, is_created)


@trust(WORKER_NAME, WORKER_ID, NUMBER, NUMBER, WORKER_NAME, FLAG)
def _rebuild(owner_name: str, owner_id: int, rref: int, fork: int, parent: str, is_created: bool) -> Any:
    """Unpack an RRef, in the context of the worker that received it."""
    scope = current_scope.get()
    if scope is None or scope.worker is None:
        raise SerializationError("an RRef can be unpickled by a worker that received it in a call, and nowhere else")
    context: RRefContext = scope.worker.rref_context
    owner = context.identified(WorkerInfo(owner_name, owner_id))
    # the id of a fork tells who made it, and that is who sends it
    held = context.receive(rref, fork, owner, WorkerInfo(parent, creator_of(fork)), is_created=is_created)
    made: RRef[Any] = RRef.of(context, rref, held)
    return made if context.skin is None else context.skin.wrap(made)


def bare(handle: Any) -> RRef[Any]:
    """The RRef itself, of one that may come in the `Skin` of its worker."""
    if isinstance(handle, RRef):
        return handle
    scope = current_scope.get()
    skin = scope.worker.rref_context.skin if scope is not None and scope.worker is not None else None
    if skin is None or not isinstance(handle, skin.cls):
        raise TypeError(f"an RRef is needed here, not {type(handle).__qualname__}")
    unwrapped: RRef[Any] = skin.unwrap(handle)
    return unwrapped
