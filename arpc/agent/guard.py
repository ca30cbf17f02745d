"""Allow-list mode: what others may call on this worker, and a codec that builds nothing but what is on the lists.

The lists themselves are in `wire.allowlist`. *Roles* say which workers may call which of the exported functions, and
which of the runtime's own messages (``arpc:RRefFetch`` and its like) they may send.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from arpc.agent.codec import Codec, Interceptor
from arpc.agent.placement import Placement
from arpc.agent.scope import current_scope
from arpc.errors import NotAllowedError
from arpc.ids import WorkerInfo
from arpc.options import RpcOptions
from arpc.wire.allowlist import Key, callable_named, may_call_method
from arpc.wire.handful import Handful
from arpc.wire.messages import Message, Request, RRefCreate
from arpc.wire.pickling import Pickler, Reducer
from arpc.wire.rebuilding import unpack
from arpc.wire.reducing import NamesOnlyPickler
from arpc.wire.restricted import read_name, restricted_loads

__all__ = ["Guard", "GuardedCodec"]


class Guard:
    """Decides for one worker."""

    def __init__(self, name: str, roles: Mapping[str, Sequence[str]]) -> None:
        self._name = name
        self._roles = roles
        self._patterns: dict[str, tuple[str, ...] | None] = {name: None}
        """What each peer may call; None if that is all that is exported. A worker may do to itself what it likes."""

    def permit(self, caller: str, key: Key) -> None:
        """Raise `NotAllowedError` unless a worker may call, or name, the function of that name."""
        self._permit(caller, ".".join(key))

    def permit_message(self, caller: str, kind: type[Message]) -> None:
        """The same for a message of the runtime's own."""
        self._permit(caller, f"arpc:{kind.__name__}")

    def _permit(self, caller: str, what: str) -> None:
        if not self._roles:
            return
        if caller not in self._patterns:
            self._patterns[caller] = tuple(
                pattern for peer, allowed in self._roles.items() if fnmatchcase(caller, peer) for pattern in allowed
            )
        patterns = self._patterns[caller]
        if patterns is not None and not any(fnmatchcase(what, pattern) for pattern in patterns):
            raise NotAllowedError(f"worker {caller!r} may not call {what} on worker {self._name!r}: no role allows it")

    def forget(self, peer: str) -> None:
        """A worker is gone: what it may call is found out anew if one of its name comes."""
        if peer != self._name:
            self._patterns.pop(peer, None)

    def get_method(self, value: Any, name: str) -> Any:
        """`getattr` for a method that others call by its name."""
        if not may_call_method(type(value), name):
            raise NotAllowedError(
                f"{type(value).__qualname__}.{name} may not be called on worker {self._name!r} from outside: mark the "
                f"method, or the class that defines it, with @arpc.export"
            )
        return getattr(value, name)


class GuardedCodec(Codec):
    """A codec for which pickles are no programs."""

    def __init__(
        self,
        guard: Guard,
        reducers: Mapping[type, Reducer],
        interceptors: Sequence[Interceptor],
        options: RpcOptions,
        placement: Placement | None = None,
        families: Mapping[type, Reducer] | None = None,
    ) -> None:
        super().__init__(
            reducers, interceptors, options.inline_tensor_bytes, placement, families, options.max_body_bytes
        )
        self.pickler = Pickler(reducers, families, NamesOnlyPickler)
        self._guard = guard

    def function(self, message: Message, caller: WorkerInfo) -> Any:
        key = read_name(memoryview(message.body)[message.table_end :])
        found = callable_named(key)
        self._guard.permit(caller.name, key)
        return found

    def slots(self, message: Message) -> list[Any]:
        if message.table_end == message.meta_end:
            return []
        table = memoryview(message.body)[message.meta_end : message.table_end]
        return unpack(table, message.body, message.buffers, is_restricted=True)

    def content(self, message: Message) -> Any:
        if message.table_end:
            return self.payload(message, self.slots(message))
        body = message.body
        if not body:
            return None
        _refuse_by_value(message)
        return self.plain_content(body, self.loads)

    def handful_of(self, message: Message) -> Handful:
        _refuse_by_value(message)
        return super().handful_of(message)

    def payload(self, message: Message, slots: list[Any]) -> Any:
        _refuse_by_value(message)
        return super().payload(message, slots)

    def loads(self, payload: bytes | bytearray | memoryview, slots: list[Any]) -> Any:
        scope = current_scope.get()
        caller = scope.caller if scope is not None else None
        # what comes back from a peer that was called may name what it likes: nobody calls it
        permit = _permit_all if caller is None else partial(self._guard.permit, caller.name)
        return restricted_loads(payload, slots, permit)


def _permit_all(_: Key) -> None:
    """For what was asked for."""


def _refuse_by_value(message: Message) -> None:
    if not message.arg and isinstance(message, Request | RRefCreate):
        raise NotAllowedError(
            "in allow-list mode functions are called by their names: a lambda, a closure, a partial, a TorchScript "
            "function or a program of torch.export has none. Export a plain function that calls it, and call that one"
        )
