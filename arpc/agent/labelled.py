"""The shortest way out for requests of a feature that name a function, as `Caller.call_and_wait` has one for calls."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sized
from threading import get_ident
from typing import Any, Final

from arpc.agent.calls import Call, Calls, Recipient
from arpc.agent.peers import Peer
from arpc.agent.scope import WorkerScope, current_scope
from arpc.wire.frames import BRIEF_HEADER, HEADER_BYTES
from arpc.wire.pickling import SCALARS

__all__ = ["MAX_UNCOUNTED_BYTES", "LabelledCalls", "never_shortly"]

_pack_brief = BRIEF_HEADER.pack
_are_scalars = SCALARS.issuperset
_dumps = pickle.dumps
_get_scope = current_scope.get
# What is larger has time for the long way
_MAX_PAYLOAD_BYTES: Final = 4096
# and what is smaller takes no more room than the books about it
MAX_UNCOUNTED_BYTES: Final = 256


class LabelledCalls:
    """The part of an agent that makes them; the rest is in the class that inherits."""

    is_closing: bool
    _default_tick: int
    _default_timeout_ms: int
    _occasions: tuple[Sized, ...]
    _shortest_thread: int
    _time: Callable[[], float]
    _turn_to_default: Callable[[Calls], None]

    def begin_shortly(
        self,
        peer: Peer,
        recipient: Recipient,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kind: int,
        label: bytes,
        *,
        is_urgent: bool,
    ) -> tuple[int, bytes] | None:
        """Send one request: at once if that is urgent, or else at the end of this turn of the loop.

        ``recipient`` hears of its reply; ``kind`` is the `brief_kind` of the message. Returns its id, and its frame.
        None: there is something special about it, so it is for `Caller.begin` to send. That is also so while anybody
        stands in the place of `Caller.begin`, who must stand in this place, too.
        """
        connection = peer.connection
        try:
            function_id = peer.function_ids.get(function)
        except TypeError:
            return None
        if (
            not function_id
            or connection is None
            or connection.is_congested
            or peer.backlog
            or _get_scope().__class__ is not WorkerScope
            or any(self._occasions)
            or self.is_closing
            or get_ident() != self._shortest_thread
        ):
            return None
        size_bytes = 0
        if args:
            if not _are_scalars(map(type, args)):
                return None
            label += _dumps(args, protocol=5)
            if len(label) > MAX_UNCOUNTED_BYTES:
                size_bytes = HEADER_BYTES + len(label)
                if size_bytes > _MAX_PAYLOAD_BYTES or not peer.take_room(size_bytes):
                    return None
        calls = peer.calls
        if self._time() >= calls.until:
            self._turn_to_default(calls)
        try:
            call_id = calls.next_id()
        except StopIteration:
            call_id = calls.take_id(self._default_tick)
        data = _pack_brief(len(label), kind, call_id, function_id, self._default_timeout_ms, 0) + label
        call = Call(recipient, function, size_bytes, connection)
        try:
            if is_urgent:
                connection.send(data)
            else:
                connection.send_later(data)
        except BaseException:
            if size_bytes:
                peer.release(call)
            raise
        calls.bucket[call_id] = call
        return call_id, data


def never_shortly(*_: Any, **__: Any) -> tuple[int, bytes] | None:
    """In the place of `LabelledCalls.begin_shortly`: nothing takes that way."""
    return None
