"""The calls to one peer that have not ended, by id and deadline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from arpc.agent.client.deadlines import NEVER, Deadlines
from arpc.agent.client.streams import ItemOrder
from arpc.agent.server.functions import name_of
from arpc.options import UNSET, Unset
from arpc.transport.bulk import BulkSend
from arpc.transport.connection import Connection
from arpc.wire.messages import MessageType
from arpc.wire.metadata import Metadata
from arpc.wire.values.content import Content

__all__ = ["SEQUENCE_BITS", "Call", "CallSender", "Cancellable", "PendingCalls", "Recipient"]

SEQUENCE_BITS: Final = 24
_MASK: Final = (1 << SEQUENCE_BITS) - 1
_REQUEST: Final = int(MessageType.REQUEST)
_EMPTY: Final[dict[int, Call]] = {}
"""The bucket of a tick that has no calls."""


class Recipient(Protocol):
    """Receives the outcome of a call, once: a future, or an object of a feature that acts like one."""

    def done(self) -> bool: ...
    def cancelled(self) -> bool: ...
    def exception(self) -> BaseException | None: ...
    def cancel(self, msg: Any = None) -> bool: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, exception: Exception, /) -> None: ...
    def add_done_callback(self, callback: Callable[[Any], object], /) -> None: ...


class Cancellable(Recipient, Protocol):
    """A recipient that, when cancelled, cancels its call by ``callee.cancel(call_id)`` or ``on_cancel()``."""

    call_id: int
    callee: Any
    on_cancel: Callable[[], object] | None


class Call(msgspec.Struct, eq=False):
    """One request of this worker, from its creation to its end: a call, or a message of a feature.

    The code that creates it fills in the first fields, `Sender.send` the rest.
    """

    peer: Any
    """The `Peer` that receives the request."""
    recipient: Any
    """The `Recipient` of the outcome."""
    function: Any
    """The function to call; the class of the message if that names no function."""
    args: Sequence[Any] | None = ()
    kwargs: Mapping[str, Any] | None = None
    timeout: float | Unset = UNSET
    type: int = _REQUEST
    flags: int = 0
    metadata: Metadata | None = None
    """The metadata to send in any case; interceptors may add to it."""
    is_internal: bool = False
    """Whether the runtime makes it for no caller: it ends with no handler, and interceptors do not see it."""
    is_held: bool = False
    """Whether it is sent only at the end of this turn of the loop, see `Peer.hold`."""
    is_awaited: bool = False
    """Whether it is made by `rpc_sync`, whose caller waits for it at once."""
    called: str = ""
    """The name shown to users, if it is not that of the function: the method of a remote value, say."""
    function_id: int = 0
    """The number of the function at the peer; 0 if the function travels with its arguments."""
    timeout_ms: int = 0
    size_bytes: int = 0
    """The bytes that it takes of the peer's send window."""
    content: Content | None = None
    """The content to send, while it waits to be sent."""
    connection: Connection | None = None
    """The connection on which it was sent; None while it waits to be sent."""
    bulk: BulkSend | None = None
    items: ItemOrder | None = None
    """Receives the items of a stream."""
    sent_at: float = 0.0
    """The time at which it was sent, if calls in flight are limited; else 0."""
    observed: Any = None
    """The observers' record of it, an `observers.Outgoing`."""

    @property
    def name(self) -> str:
        """The name shown to users: in errors, metrics and traces."""
        return self.called or name_of(self.function)


class CallSender(Protocol):
    """Sends all requests. A wrapper that sees or changes them has the same method."""

    def send(self, call: Call, /) -> int:
        """Send a request, now or when there is room; returns its id. If it raises, nothing was sent."""


class PendingCalls:
    """The calls made to one peer that have not ended.

    An id is ``tick << 24 | number``, so that the table of pending calls is the timer wheel too.
    """

    def __init__(self, deadlines: Deadlines, expired: Callable[[dict[int, Call]], None]) -> None:
        """``expired`` ends calls whose deadline has passed, which are no longer in the table."""
        self._deadlines = deadlines
        self._expired = expired
        self._buckets: dict[int, dict[int, Call]] = {}
        self.made = 0
        """The number of calls so far."""

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
        while call_id in bucket:  # the call that had this id, 16 million calls ago, still waits
            number += 1
            call_id = tick << SEQUENCE_BITS | number & _MASK
        bucket[call_id] = call
        return call_id

    def pop(self, call_id: int) -> Call | None:
        """Remove and return a call, None if it is not there. The code that gets it must end it."""
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
