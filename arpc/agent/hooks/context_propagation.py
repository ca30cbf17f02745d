"""Users' ContextVars that travel with their calls."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, TypeVar

from arpc.agent.hooks.interceptor import Interceptor
from arpc.errors import ConfigurationError, ProtocolError, SerializationError
from arpc.ids import WorkerInfo
from arpc.log import get_logger
from arpc.user_errors import summary_of
from arpc.wire.values.packing import Slot
from arpc.wire.values.pickler import Pickler
from arpc.wire.values.policy import Policy

__all__ = ["ContextPropagation", "propagate"]

logger = get_logger("arpc.variables")

T = TypeVar("T")

# Global, because ContextVars are module globals themselves; this is not state of a worker
_declared: dict[str, ContextVar[Any]] = {}


def propagate(variable: ContextVar[T]) -> ContextVar[T]:
    """Let a ContextVar travel with calls: handlers see the value their caller had. Returns the variable.

    Caller and callee declare it under the same name, usually by importing the module that does. Raises
    `ConfigurationError` if another variable has this name.

    >>> request_id = propagate(ContextVar("request_id", default=""))
    """
    known = _declared.setdefault(variable.name, variable)
    if known is not variable:
        raise ConfigurationError(f"another ContextVar named {variable.name!r} is propagated already: names must differ")
    return variable


class ContextPropagation(Interceptor):
    """The interceptor that sends propagated ContextVars with requests."""

    key = "vars"

    def __init__(self, policy: Policy) -> None:
        self.occasions = _declared
        self._pickler = Pickler(kind=policy.pickler)
        self._policy = policy

    def request_sent(self, peer: WorkerInfo, function: Any, slots: list[Slot], is_stream: bool = False) -> bytes | None:
        values: dict[str, Any] = {}
        for name, variable in _declared.items():
            try:
                values[name] = variable.get()
            except LookupError:
                continue  # not set, and without a default
        if not values:
            return None
        try:
            payload, memory = self._pickler.dumps(values, main_by_value=True)
        except Exception as error:
            raise SerializationError(f"a propagated ContextVar cannot be sent: {summary_of(error)}") from error
        if memory:
            raise SerializationError("a propagated ContextVar holds a tensor: pass it as an argument instead")
        return payload

    def request_received(self, peer: WorkerInfo, meta: bytes, slots: list[Any]) -> None:
        values = self._policy.read(meta, [], peer)
        if type(values) is not dict:
            raise ProtocolError("propagated ContextVars that are no dict")
        for name, value in values.items():
            variable = _declared.get(name)
            if variable is None:
                logger.debug("worker %s sent the ContextVar %r, which is not propagated here", peer.name, name)
            else:
                variable.set(value)
