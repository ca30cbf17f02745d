"""The shortest way out for calls with a few small tensors on which nothing rides but a note."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sized
from typing import Any, Final

from torch import Tensor

from arpc.agent.calls import Call, Calls
from arpc.agent.codec import Codec
from arpc.agent.labelled import MAX_UNCOUNTED_BYTES
from arpc.agent.peers import Peer
from arpc.transport.base import Connection
from arpc.wire.frames import HEADER_BYTES, HEADER_WITH_TERMS, brief_kind
from arpc.wire.handful import ARGUMENTS_AND_NOTE, NOTE_BYTES
from arpc.wire.messages import MessageType
from arpc.wire.noted import without_note

__all__ = ["NotedCalls"]

_pack_with_terms = HEADER_WITH_TERMS.pack
_BRIEF_REQUEST: Final = brief_kind(int(MessageType.REQUEST))
_ONLY_TENSORS: Final = {Tensor}


class NotedCalls:
    """The part of an agent that makes them; the rest is in the class that inherits."""

    codec: Codec
    _begin_recorded: Callable[[Peer, Connection, asyncio.Future[Any], Callable[..., Any], Any, bytes], int]
    _default_tick: int
    _least_bytes: int
    _occasions: tuple[Sized, ...]
    _time: Callable[[], float]
    _turn_to_default: Callable[[Calls], None]

    def _begin_noted(
        self,
        peer: Peer,
        connection: Connection,
        future: asyncio.Future[Any],
        function: Callable[..., Any],
        args: Any,
        terms: bytes,
    ) -> int:
        """Make a call on which something may ride.

        Whatever may keep it from going this way is looked at before the note is made: that has consequences.
        """
        codec = self.codec
        if (
            args.__class__ is not tuple
            or set(map(type, args)) != _ONLY_TENSORS
            or sum(map(bool, self._occasions)) != 1
            or (noting := codec.noting) is None
            or not noting.occasions
            or connection.is_congested
            or (codec.has_placement and codec.moves_host_memory(peer.info.name))
            or (payload := codec.handful(ARGUMENTS_AND_NOTE, args)) is None
        ):
            return self._begin_recorded(peer, connection, future, function, args, terms)
        # From here on this is `Caller._send_simple`
        size_bytes = 0
        size = len(payload) + NOTE_BYTES
        if size > MAX_UNCOUNTED_BYTES or self._least_bytes:
            size_bytes = HEADER_BYTES + size
            if not peer.take_room(size_bytes):
                return self._begin_recorded(peer, connection, future, function, args, terms)
        note = noting.note_request(peer.info, function, args)
        if note is None:
            note = b""
            payload = without_note(payload)
            size -= NOTE_BYTES
        calls = peer.calls
        if self._time() >= calls.until:
            self._turn_to_default(calls)
        try:
            call_id = calls.next_id()
        except StopIteration:
            call_id = calls.take_id(self._default_tick)
        calls.bucket[call_id] = Call(future, function, size_bytes, connection, True)
        connection.send(_pack_with_terms(size, _BRIEF_REQUEST, call_id, terms, 0) + payload + note)
        return call_id
