"""Calls on their way to one peer, by id and deadline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from arpc.agent.client.deadlines import NEVER, Deadlines
from arpc.agent.client.streams import ItemOrder
from arpc.agent.server.functions import name_of
from arpc.options import UNSET, Unset
from arpc.transport.connection import BulkSend, Connection
from arpc.wire.messages import MessageType
from arpc.wire.metadata import Metadata
from arpc.wire.values.content import Content

__all__ = ["SEQUENCE_BITS", "Call", "CallSender", "Cancellable", "PendingCalls", "Recipient"]

SEQUENCE_BITS: Final = 24
_MASK: Final = (1 << SEQUENCE_BITS) - 1
_REQUEST: Final = int(MessageType.REQUEST)
_EMPTY: Final[dict[int, Call]] = {}
"""Of a tick that has no calls."""


class Recipient(Protocol):
    """Receives the outcome of a call, once: a future, or a part of a feature that acts like one."""

    def done(self) -> bool: ...
    def cancelled(self) -> bool: ...
    def exception(self) -> BaseException | None: ...
    def cancel(self, msg: Any = None) -> bool: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, exception: Exception, /) -> None: ...
    def add_done_callback(self, callback: Callable[[Any], object], /) -> None: ...


class Cancellable(Recipient, Protocol):
    """A recipient that ends its call itself when it is cancelled: ``callee.cancel(call_id)``, or ``on_cancel()``."""

    call_id: int
    callee: Any
    on_cancel: Callable[[], object] | None


class Call(msgspec.Struct, eq=False):
    """One request of this worker, from the verb that makes it to its end: a call, or a message of a feature.

    The verb fills in the first fields, `Sender.send` the rest.
    """

    peer: Any
    """The `Peer` that it is for."""
    recipient: Any
    """A `Recipient`."""
    function: Any
    """What is called; the class of the message if that names no function."""
    args: Sequence[Any] | None = ()
    kwargs: Mapping[str, Any] | None = None
    timeout: float | Unset = UNSET
    type: int = _REQUEST
    flags: int = 0
    metadata: Metadata | None = None
    """What is sent along in any case."""
    is_internal: bool = False
    """Made by the runtime for no caller: it ends with no handler, and interceptors do not see it."""
    is_held: bool = False
    """It is sent at the end of this turn of the loop, see `Peer.hold`."""
    is_awaited: bool = False
    """Made by `rpc_sync`, whose caller waits for it at once."""
    called: str = ""
    """What people call it, if that is not the name of the function: the method of a remote value."""
    function_id: int = 0
    """The number of the function at the peer; 0 if the function travels with its arguments."""
    timeout_ms: int = 0
    size_bytes: int = 0
    """What it takes of the window."""
    content: Content | None = None
    """What is to be sent, while it waits to be sent."""
    connection: Connection | None = None
    """What it was sent on; None while it waits to be sent."""
    bulk: BulkSend | None = None
    items: ItemOrder | None = None
    """Takes the items of a stream."""
    sent_at: float = 0.0
    """When it was sent, if that is looked at."""
    observed: Any = None
    """What observers know of it, an `observers.Outgoing`."""

    @property
    def name(self) -> str:
        """What people call it."""
        return self.called or name_of(self.function)


class CallSender(Protocol):
    """The one way out for requests. A wrapper that wants to see or change all of them has the same method."""

    def send(self, call: Call, /) -> int:
        """Send a request, now or when there is room; returns its id. Raises before anything is sent if it cannot be."""


class PendingCalls:
    """The calls made to one peer that have not ended.

    An id is ``tick << 24 | number``, so that the table of pending calls is the timer wheel too.
    """

    def __init__(self, deadlines: Deadlines, expired: Callable[[dict[int, Call]], None]) -> None:
        """``expired`` ends calls whose time has come, which are not in the table any more."""
        self._deadlines = deadlines
        self._expired = expired
        self._buckets: dict[int, dict[int, Call]] = {}
        self.made = 0
        """How many there have been."""

    def add(self, tick: int, call: Call) -> int:
        """Keep a call until its end; returns its id."""
        try:
            bucket = self._buckets[tick]
        except KeyError:
            bucket = self._buckets[tick] = {}
            if tick != NEVER:
                self._deadlines.watch(tick, self)
        self.made = number = self.made + 1
        call_id = tick << SEQUENCE_BITS | number & _MASK
        while call_id in bucket:  # sixteen million calls later, one of them still waits
            number += 1
            call_id = tick << SEQUENCE_BITS | number & _MASK
        bucket[call_id] = call
        return call_id

    def pop(self, call_id: int) -> Call | None:
        """Take a call out. The code that gets it here ends it."""
        return self._buckets.get(call_id >> SEQUENCE_BITS, _EMPTY).pop(call_id, None)

    def get(self, call_id: int) -> Call | None:
        return self._buckets.get(call_id >> SEQUENCE_BITS, _EMPTY).get(call_id)

    def expire(self, tick: int) -> None:
        self._expired(self._buckets.pop(tick, {}))

    def clear(self) -> None:
        """Forget all calls."""
        self._buckets.clear()

    def __iter__(self) -> Iterator[tuple[int, Call]]:
        for bucket in list(self._buckets.values()):
            yield from list(bucket.items())

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))
