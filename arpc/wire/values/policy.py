"""The one way by which what a peer sent becomes objects, and the two policies there are for it.

Every pickle of a peer, in whatever message it comes, is read by `Policy.read`, every function that a peer wants to call
by `Policy.function`, and every table of tensors by `Policy.layout`. All that these need to know of the sender is an
argument: what comes in a reply is judged like what comes in a request.

- `UNRESTRICTED`: peers are trusted with everything. A pickle may name and call anything.
- `AllowList`: a pickle is data, see `wire.values.restricted`. *Roles* say which workers may call, or name, which of the
  exported functions, and which of the runtime's own messages (``arpc:RRefFetch`` and its like) they may send.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final

from torch import Tensor
from torch.nn import Parameter

from arpc.errors import NotAllowedError
from arpc.ids import WorkerInfo
from arpc.options import UNSET
from arpc.wire.messages import Message
from arpc.wire.values.allowlist import Key, callable_named, may_call_method
from arpc.wire.values.layouts import read_layout
from arpc.wire.values.pickler import loads
from arpc.wire.values.reducers import HolePickler, NamesOnlyPickler
from arpc.wire.values.restricted import read_name, restricted_loads

__all__ = ["UNRESTRICTED", "AllowList", "Policy"]

Bytes = bytes | bytearray | memoryview


class Unrestricted:
    """A peer that may send anything may run any code here."""

    is_restricted: Final = False
    """Whether there is anything that a peer may not do."""
    pickler: Final = HolePickler
    """What makes pickles that peers with the same policy take."""
    read = staticmethod(loads)
    """The object of a pickle and its slots, from this sender. Raises whatever unpickling raises."""
    layout = staticmethod(read_layout)
    """What a table of tensors says. Raises `ProtocolError`."""
    get_method = staticmethod(getattr)
    """`getattr` for a method that a peer calls by its name. Raises `NotAllowedError`."""

    def function(self, payload: Bytes, _sender: WorkerInfo) -> Any:
        """What a peer will call by number. Raises `NotAllowedError`, or whatever unpickling raises."""
        return loads(payload, []) if payload else None

    def check_code(self) -> None:
        """A request brings its function instead of the number of one. Raises `NotAllowedError` if that is refused."""

    def check_plain(self, arguments: Any) -> None:
        """A message of the runtime's own was read. Raises `NotAllowedError` if it must be plain data and is not."""

    def check_message(self, sender: WorkerInfo, kind: type[Message]) -> None:
        """A message of the runtime's own has come. Raises `NotAllowedError` if this sender may not send it."""

    def forget(self, peer: str) -> None:
        """Drop what is remembered of a worker that has left for good."""


UNRESTRICTED: Final = Unrestricted()


_PLAIN: Final = frozenset((int, float, bool, str, bytes, type(None), Tensor, Parameter, WorkerInfo, type(UNSET)))
_MAX_PLAIN_DEPTH: Final = 8


def _is_plain(value: Any) -> bool:
    """Whether there is nothing in it that could stand for more than it takes up: a `range` is as good as a list.

    What is there in many places is looked at once for each level.
    """
    level = {id(value): value}
    for _ in range(_MAX_PLAIN_DEPTH + 1):
        inner: dict[int, Any] = {}
        for each in level.values():
            kind = type(each)
            if kind in _PLAIN:
                continue
            if kind is dict:
                inner.update((id(part), part) for item in each.items() for part in item)
            elif kind is list or kind is tuple:
                inner.update((id(part), part) for part in each)
            else:
                return False
        level = inner
    return not level


class AllowList:
    """Peers call what is exported, and send what is on the lists of `wire.values.allowlist`."""

    is_restricted: Final = True
    pickler: Final = NamesOnlyPickler
    layout = staticmethod(partial(read_layout, is_restricted=True))

    def __init__(self, name: str, roles: Mapping[str, Sequence[str]] | None = None) -> None:
        """``name`` is the worker's own. Without roles, all peers may call all that is exported."""
        self._name = name
        self._roles = roles or {}
        self._patterns: dict[str, tuple[str, ...] | None] = {name: None}
        """What each peer may call; None if that is all that is exported. A worker may do to itself what it likes."""

    def read(self, payload: Bytes, slots: list[Any], sender: WorkerInfo) -> Any:
        return restricted_loads(payload, slots, partial(self._permit_function, sender.name))

    def function(self, payload: Bytes, sender: WorkerInfo) -> Any:
        key = read_name(payload)
        found = callable_named(key)
        self._permit_function(sender.name, key)
        return found

    def forget(self, peer: str) -> None:
        if peer != self._name:
            self._patterns.pop(peer, None)

    def check_code(self) -> None:
        raise NotAllowedError(
            "in allow-list mode functions are called by their names: a lambda, a closure, a partial, a TorchScript "
            "function or a program of torch.export has none. Export a plain function that calls it, and call that one"
        )

    def check_plain(self, arguments: Any) -> None:
        if not _is_plain(arguments):
            raise NotAllowedError("a message of the runtime's own with something else than numbers, texts and tensors")

    def check_message(self, sender: WorkerInfo, kind: type[Message]) -> None:
        self._permit(sender.name, f"arpc:{kind.__name__}")

    def _permit_function(self, sender: str, key: Key) -> None:
        self._permit(sender, ".".join(key))

    def _permit(self, sender: str, what: str) -> None:
        if not self._roles:
            return
        if sender not in self._patterns:
            self._patterns[sender] = tuple(
                pattern for peer, allowed in self._roles.items() if fnmatchcase(sender, peer) for pattern in allowed
            )
        patterns = self._patterns[sender]
        if patterns is not None and not any(fnmatchcase(what, pattern) for pattern in patterns):
            raise NotAllowedError(f"worker {sender!r} may not call {what} on worker {self._name!r}: no role allows it")

    def get_method(self, value: Any, name: str) -> Any:
        if not may_call_method(type(value), name):
            raise NotAllowedError(
                f"{type(value).__qualname__}.{name} may not be called on worker {self._name!r} from outside: mark the "
                f"method, or the class that defines it, with @arpc.export"
            )
        return getattr(value, name)


Policy = Unrestricted | AllowList
"""What peers may do to a worker. It is the same object for all that the worker receives."""
