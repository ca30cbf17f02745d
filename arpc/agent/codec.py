"""Messages with content: pickles, tensors, and what interceptors add."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from torch import Tensor

from arpc.agent.notes import Noting
from arpc.agent.placement import PLACE, Placement, ToCaller
from arpc.errors import ProtocolError, SerializationError
from arpc.ids import WorkerInfo
from arpc.wire.frames import HEADER_BYTES, MAX_BODY_BYTES, frame
from arpc.wire.handful import (
    ARGUMENTS,
    ARGUMENTS_AND_META,
    ARGUMENTS_AND_NOTE,
    LAST_KIND,
    MAX_TENSORS,
    NOTED,
    PARCEL_ARGUMENT,
    PARCEL_RESULT,
    PICKLED_ARGUMENTS,
    PICKLED_RESULT,
    RESULT,
    RESULT_AND_META,
    RESULT_AND_NOTE,
    Handful,
    handful_payload,
    unpack_arguments,
    unpack_handful,
    unpack_result,
)
from arpc.wire.messages import Message
from arpc.wire.pickling import JUST_A_TENSOR, JUST_TENSORS, Pickler, Reducer, dumps_plain
from arpc.wire.policy import UNRESTRICTED, Policy
from arpc.wire.staging import Stager
from arpc.wire.tensors import Slot, pack

__all__ = ["Codec", "Interceptor", "Packed"]

_NO_SLOTS: Final[list[Any]] = []
_AND_META: Final = {ARGUMENTS: ARGUMENTS_AND_META, RESULT: RESULT_AND_META}
_AND_NOTE: Final = {ARGUMENTS: ARGUMENTS_AND_NOTE, RESULT: RESULT_AND_NOTE}
_LONE: Final = frozenset((RESULT, RESULT_AND_META, RESULT_AND_NOTE))
_ALL_TO_CALLER: Final = ToCaller({}, moves_host_memory=True)
_encode_meta = msgspec.msgpack.Encoder().encode
_decode_meta = msgspec.msgpack.Decoder(dict[str, Any]).decode


class Packed(NamedTuple):
    """What a handler returns if it has pickled its result itself."""

    payload: bytes
    slots: list[Slot]


class Interceptor(Protocol):
    """A feature that rides on calls: it sees their tensors, and may add data of its own under its `key`.

    What the `_sent` methods return travels as msgpack; None adds nothing. The other side's `_received` method is called
    only if something came. ``slots`` may be changed in place. Nothing here may raise for another reason than that the
    call cannot go on.
    """

    key: str

    @property
    def occasions(self) -> Sized:
        """While this is empty, the interceptor has nothing to add and is not asked. Always the same object."""

    def request_sent(self, peer: WorkerInfo, function: Any, slots: list[Slot], is_stream: bool = False) -> Any:
        """In the caller's context, before a request leaves. A stream has an answer for each of its items."""

    def request_received(self, peer: WorkerInfo, meta: Any, slots: list[Any]) -> None:
        """In the handler's own context, before its arguments are built."""

    def reply_sent(self, peer: WorkerInfo, meta: Any, slots: list[Slot]) -> Any:
        """In the handler's context; ``meta`` is what came with the request."""

    def reply_received(self, peer: WorkerInfo, meta: Any, slots: list[Any]) -> None:
        """At the caller, before the result is built. Not in the caller's context."""


class Codec:
    """Packs and unpacks the content of messages for one worker.

    Whatever it unpacks goes through its `policy`, together with the worker that sent it.
    """

    def __init__(
        self,
        reducers: Mapping[type, Reducer],
        interceptors: Sequence[Interceptor],
        inline_tensor_bytes: int,
        placement: Placement | None = None,
        families: Mapping[type, Reducer] | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        policy: Policy = UNRESTRICTED,
    ) -> None:
        self.policy = policy
        self.read = policy.read
        """The object of a pickle and its slots, from this sender. Raises whatever unpickling raises."""
        self.pickler = Pickler(reducers, families, policy.pickler)
        self.interceptors = tuple(interceptors)
        self._by_key = {interceptor.key: interceptor for interceptor in interceptors}
        self.noting = next((known for known in interceptors if isinstance(known, Noting)), None)
        """The one whose notes need no name."""
        self.max_payload_bytes = max_body_bytes * 7 // 8
        """The largest pickle that is sent. Room is left for what describes tensors, and for those of a handful."""
        self._max_body_bytes = max_body_bytes
        self._inline_limit = min(inline_tensor_bytes, max_body_bytes // (8 * MAX_TENSORS))
        self._placement = placement
        self.has_placement = placement is not None
        self.handful: Callable[..., bytes | None] = partial(handful_payload, self._inline_limit)
        """The payload of a message with a few small tensors, see `wire.handful`; None if it takes a `frame`."""

    def frame(
        self,
        type_: int,
        flags: int,
        id_: int,
        arg: int,
        timeout_ms: int,
        payload: bytes,
        slots: list[Slot],
        meta: dict[str, Any] | None = None,
        stager: Stager | None = None,
    ) -> tuple[bytes, list[memoryview]]:
        """A frame, and the memory that follows it. The stager is one of the two below.

        Raises `SerializationError` if there is more of it than a peer takes.
        """
        packed_meta = _encode_meta(meta) if meta else b""
        if not slots:
            return frame(type_, flags, id_, arg, timeout_ms, payload, packed_meta), []
        for inline_limit in (self._inline_limit, 0):
            packed = pack(slots, inline_limit, stager)
            data = frame(
                type_,
                flags,
                id_,
                arg,
                timeout_ms,
                payload,
                packed_meta,
                packed.table,
                packed.inline,
                packed.buffer_sizes,
            )
            if len(data) - HEADER_BYTES <= self._max_body_bytes:
                break
            # there are so many small ones that they follow as large ones do
        else:
            raise SerializationError(
                f"what describes {len(slots)} tensors and the objects around them takes {len(data)} bytes, and at most "
                f"{self._max_body_bytes} are taken: send them in parts, or raise RpcOptions.max_body_bytes"
            )
        if packed.waits and self._placement is not None:
            return data, self._placement.late(packed.buffers, packed.waits)
        return data, packed.buffers

    def moves_host_memory(self, to: str) -> bool:
        """Whether tensors in host memory belong on devices of a worker, so that none of them is inline."""
        return self._placement is not None and self._placement.stager(to).moves_host_memory

    def handful_of_arguments(
        self, payload: bytes, slots: Sequence[Slot], meta: dict[str, Any] | None, to: str
    ) -> bytes | None:
        """The `handful` of a call with tensors, whatever rides on it."""
        if self.moves_host_memory(to):
            return None
        count = len(slots)
        if payload and (count > MAX_TENSORS or payload is not JUST_TENSORS[count]):
            return self._pickled_handful(PICKLED_ARGUMENTS, slots, meta, payload)
        return self._handful_with(meta, ARGUMENTS, slots) if meta else self.handful(ARGUMENTS, slots)

    def handful_of_tensors(self, slots: Sequence[Slot], meta: dict[str, Any]) -> bytes | None:
        """The same for tensors alone, and a worker whose host memory they go to."""
        return self._handful_with(meta, ARGUMENTS, slots) if meta else self.handful(ARGUMENTS, slots)

    def handful_of_result(self, payload: bytes, slots: Sequence[Slot], meta: dict[str, Any] | None) -> bytes | None:
        """The same for a reply that need not go to a device."""
        if payload is not JUST_A_TENSOR:
            return self._pickled_handful(PICKLED_RESULT, slots, meta, payload)
        return self._handful_with(meta, RESULT, slots) if meta else self.handful(RESULT, slots)

    def _handful_with(self, meta: dict[str, Any], kind: int, slots: Sequence[Slot]) -> bytes | None:
        """The same for a message on which something rides; ``kind`` is what it would be if nothing did."""
        if len(meta) == 1 and self.noting is not None and (note := meta.get(self.noting.key)) is not None:
            all_but_note = self.handful(_AND_NOTE[kind], slots)
            return None if all_but_note is None else all_but_note + note
        return self.handful(_AND_META[kind], slots, _encode_meta(meta))

    def _pickled_handful(
        self, kind: int, slots: Sequence[Slot], meta: dict[str, Any] | None, payload: bytes
    ) -> bytes | None:
        made = self.handful(kind, slots, _encode_meta(meta) if meta else b"", payload)
        # All that is beside a pickle of the largest size may be more than there is room for
        return made if made is None or len(made) <= self._max_body_bytes else None

    def parcel(self, kind: int, head: bytes, tensors: Sequence[Tensor | None]) -> bytes | None:
        """The payload of a feature's own message, a list of bytes and of small tensors after it, or of the answer."""
        return self.handful(kind, tensors, b"", head) if self._placement is None else None

    def brief_result(self, value: Any) -> bytes | None:
        """The payload of a reply with no meta data, made in any thread; None if it takes more than that."""
        return self.handful(RESULT, (value,)) if type(value) is Tensor else dumps_plain(value)

    def stager_to(self, worker: str) -> Stager | None:
        """For the arguments of calls to a worker; None if nothing but the CPU is known here."""
        return None if self._placement is None else self._placement.stager(worker)

    def stager_back(self, request_meta: dict[str, Any] | None) -> Stager | None:
        """For the answer to a request that came with this meta data."""
        is_asked = request_meta is not None and PLACE in request_meta
        if self._placement is None:
            return _ALL_TO_CALLER if is_asked else None
        return self._placement.all_to_caller if is_asked else self._placement.to_caller

    def slots(self, message: Message, sender: WorkerInfo) -> list[Any]:
        """The tensors of a message. Raises `ProtocolError` or `SerializationError`."""
        if message.table_end == message.meta_end:
            return []
        table = memoryview(message.body)[message.meta_end : message.table_end]
        return self.policy.tensors(table, message.body, message.buffers, sender)

    def meta(self, message: Message) -> dict[str, Any]:
        """What interceptors of the peer added. Raises `ProtocolError`."""
        return {} if message.meta_end == message.meta_start else self.decoded(message.meta)

    @staticmethod
    def decoded(meta: bytes | bytearray | memoryview) -> dict[str, Any]:
        """The same of what is not empty."""
        try:
            return _decode_meta(meta)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolError(f"malformed meta data: {error}") from error

    def added_to(self, handful: Handful) -> dict[str, Any]:
        """The same of a handful, on which something rides."""
        kind, _, meta, _ = handful
        if kind not in NOTED:
            return self.decoded(meta)
        if self.noting is None:
            raise ProtocolError("a note that nobody here can read")
        return {self.noting.key: bytes(meta)}

    def content(self, message: Message, sender: WorkerInfo) -> Any:
        """The object in a message to which nothing was added. Raises `ProtocolError`, or whatever unpickling raises."""
        if message.table_end:
            return self.payload(message, self.slots(message, sender), sender)
        return self.plain_content(message.body, sender) if message.body else None

    def plain_content(self, payload: bytes | bytearray, sender: WorkerInfo) -> Any:
        """The object in a payload that is not empty and has no tensors beside it. It is the object's from now on.

        Not for a payload with which something rides: see `is_handful`.
        """
        kind = payload[0]
        if kind > LAST_KIND:
            return self.read(payload, _NO_SLOTS, sender)
        if kind == ARGUMENTS:
            return unpack_arguments(payload)
        if kind == RESULT:
            return unpack_result(payload)
        handful = unpack_handful(payload)
        if handful[2]:
            raise ProtocolError("something rides on a message that nobody looks for it in")
        return self.handful_object(handful, sender)

    def handful_of(self, message: Message) -> Handful:
        """What is in such a message, the object not yet built. Raises `ProtocolError`."""
        return unpack_handful(message.body)

    @staticmethod
    def is_handful(message: Message) -> bool:
        """Whether a message is a handful of tensors, with which something may ride. One with a label never is."""
        body = message.body
        return not (message.table_end or message.label_bytes) and len(body) > 0 and RESULT < body[0] <= LAST_KIND

    def handful_object(self, handful: Handful, sender: WorkerInfo) -> Any:
        """The object of a handful. Raises `ProtocolError`, or whatever unpickling raises."""
        kind, slots, _, content = handful
        if kind in _LONE:
            return slots[0]
        if kind in {PICKLED_ARGUMENTS, PICKLED_RESULT}:
            return self.read(content, slots, sender)
        if kind in {PARCEL_ARGUMENT, PARCEL_RESULT}:
            parcel = [bytes(content), *slots]
            return parcel if kind == PARCEL_RESULT else (parcel,)
        return tuple(slots)

    def payload(self, message: Message, slots: list[Any], sender: WorkerInfo) -> Any:
        """The object in a message, None if there is none. Raises whatever unpickling raises."""
        start = message.table_end + message.label_bytes
        body = message.body
        if not start:
            return self.read(body, slots, sender) if body else None
        if start == len(body):
            return None
        return self.read(memoryview(body)[start:], slots, sender)

    def function(self, message: Message, sender: WorkerInfo) -> Any:
        """What a peer will call by number. Raises whatever unpickling raises."""
        return self.policy.function(memoryview(message.body)[message.table_end :], sender)

    # -- interceptors

    def receive_request(self, peer: WorkerInfo, meta: dict[str, Any], slots: list[Any]) -> None:
        for key, value in meta.items():
            (self._by_key.get(key) or self._unknown(key)).request_received(peer, value, slots)

    def intercept_reply(self, peer: WorkerInfo, meta: dict[str, Any], slots: list[Slot]) -> dict[str, Any]:
        reply: dict[str, Any] = {}
        for key, value in meta.items():
            added = (self._by_key.get(key) or self._unknown(key)).reply_sent(peer, value, slots)
            if added is not None:
                reply[key] = added
        return reply

    def receive_reply(self, peer: WorkerInfo, meta: dict[str, Any], slots: list[Any]) -> None:
        for key, value in meta.items():
            (self._by_key.get(key) or self._unknown(key)).reply_received(peer, value, slots)

    @staticmethod
    def _unknown(key: str) -> Interceptor:
        raise ProtocolError(f"meta data of the unknown feature {key!r}")
