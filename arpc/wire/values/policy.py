"""The two policies by which data from peers become objects. There is no other way.

Every pickle of a peer, in any message, is read by `Policy.read`, every function that a peer wants to call by
`Policy.function`, and every table of tensors by `Policy.layout`. Their only information about the sender is an
argument, so replies are checked like requests.

- `UNRESTRICTED`: peers are trusted with everything. A pickle may name and call anything.
- `AllowList`: a pickle is data, see `wire.values.restricted`. *Roles* define which workers may call, or name, which of
  the exported functions, and which of the runtime's own messages (``arpc:RRefFetch`` and its like) they may send.
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
    """Peers may send anything, and so may run any code here."""

    is_restricted: Final = False
    """Whether the policy refuses anything."""
    pickler: Final = HolePickler
    """The class for pickles that peers with the same policy accept."""
    read = staticmethod(loads)
    """Return the object of a pickle and its slots, from this sender. Raises any error of unpickling."""
    layout = staticmethod(read_layout)
    """Read a table of tensors. Raises `ProtocolError`."""
    get_method = staticmethod(getattr)
    """`getattr` for a method that a peer calls by its name. Raises `NotAllowedError`."""

    def function(self, payload: Bytes, _sender: WorkerInfo) -> Any:
        """Return a function that a peer will call by number. Raises `NotAllowedError`, or any error of unpickling."""
        return loads(payload, []) if payload else None

    def check_code(self) -> None:
        """Check a request that has a function instead of the number of one. Raises `NotAllowedError` to refuse it."""

    def check_plain(self, arguments: Any) -> None:
        """Check the arguments of a message of the runtime. Raises `NotAllowedError` if plain data is required."""

    def check_message(self, sender: WorkerInfo, kind: type[Message]) -> None:
        """Check a message of the runtime. Raises `NotAllowedError` if this sender may not send it."""

    def forget(self, peer: str) -> None:
        """Drop what is cached for a worker that has left for good."""


UNRESTRICTED: Final = Unrestricted()


_PLAIN: Final = frozenset((int, float, bool, str, bytes, type(None), Tensor, Parameter, WorkerInfo, type(UNSET)))
_MAX_PLAIN_DEPTH: Final = 8


def _is_plain(value: Any) -> bool:
    """Whether a value has no parts that could stand for more than their own size, as a `range` stands for a list.

    A part that is in many places is checked once for each level.
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
    """Peers may call exported functions only, and send only objects on the lists of `wire.values.allowlist`."""

    is_restricted: Final = True
    pickler: Final = NamesOnlyPickler
    layout = staticmethod(partial(read_layout, is_restricted=True))

    def __init__(self, name: str, roles: Mapping[str, Sequence[str]] | None = None) -> None:
        """``name`` is this worker's own. Without roles, all peers may call all exported functions."""
        self._name = name
        self._roles = roles or {}
        self._patterns: dict[str, tuple[str, ...] | None] = {name: None}
        """The patterns of functions that each peer may call; None for this worker itself, which may call all."""

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
"""The rules for what peers may do to a worker. One object is used for everything that the worker receives."""
