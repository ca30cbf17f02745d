"""The content of messages: objects to bytes and back, and the metadata of interceptors.

`Codec` is the one place where an object becomes the content of a message, and where the content that a peer sent
becomes an object. Everything that it reads goes through its `policy`. Encoding does not depend on the peer, except for
reducers that hand out references to it (RRefs), for functions of ``__main__`` and for device maps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from arpc.agent.hooks.device_placement import PLACE, DeviceStager, Placement
from arpc.agent.hooks.interceptor import Interceptor
from arpc.errors import ProtocolError, SerializationError
from arpc.ids import WorkerInfo
from arpc.wire.frames import MAX_BODY_BYTES
from arpc.wire.messages import Message
from arpc.wire.metadata import Metadata, decode_metadata
from arpc.wire.values.content import Content
from arpc.wire.values.device_staging import Stager
from arpc.wire.values.packing import Slot
from arpc.wire.values.pickler import Pickler, Reducer
from arpc.wire.values.policy import UNRESTRICTED, Policy
from arpc.wire.values.schemas import Packer

__all__ = ["Codec", "decode_metadata"]

_NO_SLOTS: Final[list[Any]] = []
_NO_METADATA: Final[Metadata] = {}
_ALL_TO_CALLER: Final = DeviceStager({}, str, moves_host_memory=True)


class Codec:
    """Encodes and decodes the content of messages for one worker."""

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
        """Rebuilds the object of a pickle and its slots, from a given sender. Raises whatever unpickling raises."""
        self.pickler = Pickler(reducers, families, policy.pickler)
        self.interceptors = tuple(interceptors)
        self._by_key = {interceptor.key: interceptor for interceptor in interceptors}
        self._keys_in_threads = {interceptor.key for interceptor in interceptors if interceptor.replies_in_threads}
        self.max_pickle_bytes = max_body_bytes * 7 // 8
        """The size of the largest pickle that is sent. It leaves room for metadata and the table of tensors."""
        self.pack = Packer(inline_tensor_bytes, max_body_bytes).pack
        """Builds the content of a message with tensors. The stager, if any, is from `stager_to` or `stager_back`."""
        self._placement = placement
        self.knows_devices = placement is not None
        """Whether this worker or a peer has devices besides the CPU: tensors may have to be staged."""

    # -- encoding

    def when_filled(self, content: Content, then: Callable[[SerializationError | None], None]) -> None:
        """Call ``then`` on the loop once tensors are copied from devices to host memory, or with the error."""
        assert self._placement is not None  # without it, no content waits for devices
        self._placement.when_filled(content.waits, then)

    def stager_to(self, worker: str) -> Stager | None:
        """Return the stager for the arguments of calls to a worker; None if no device but the CPU is known here."""
        return None if self._placement is None else self._placement.stager(worker)

    def stager_back(self, request: Metadata | None) -> Stager | None:
        """Return the stager for the reply to a request with this metadata; None if it needs none."""
        is_asked = request is not None and PLACE in request
        if self._placement is None:
            return _ALL_TO_CALLER if is_asked else None
        return self._placement.all_to_caller if is_asked else self._placement.to_caller

    # -- decoding

    @staticmethod
    def slots(message: Message) -> list[Any]:
        """Return the tensors of a message. Raises `ProtocolError` or `SerializationError`."""
        layout = message.layout
        return _NO_SLOTS if layout is None else layout.build(message.memory, message.buffers)

    def metadata(self, message: Message) -> Metadata:
        """Return the metadata that interceptors of the peer have added. Raises `ProtocolError`."""
        return decode_metadata(message.meta) if message.meta else _NO_METADATA

    def content(self, message: Message, slots: list[Any], sender: WorkerInfo) -> Any:
        """Return the object in a message, None if there is none. Raises whatever unpickling raises."""
        body = message.body
        return self.read(body, slots, sender) if body else None

    def function(self, message: Message, sender: WorkerInfo) -> Any:
        """Return the function that a peer will call by number. Raises whatever unpickling raises."""
        return self.policy.function(message.body, sender)

    # -- interceptors

    def request_received(self, peer: WorkerInfo, meta: Metadata, slots: list[Any]) -> None:
        for key, value in meta.items():
            (self._by_key.get(key) or self._unknown(key)).request_received(peer, value, slots)

    def reply_sent(self, peer: WorkerInfo, meta: Metadata, slots: list[Slot]) -> Metadata:
        reply: Metadata = {}
        for key, value in meta.items():
            added = (self._by_key.get(key) or self._unknown(key)).reply_sent(peer, value, slots)
            if added is not None:
                reply[key] = added
        return reply

    def replies_in_thread(self, meta: Metadata | None) -> bool:
        """Return whether a thread may encode and send the reply to a request with this metadata."""
        return not meta or (len(meta) == 1 and not self._keys_in_threads.isdisjoint(meta))

    def reply_sent_in_thread(self, peer: WorkerInfo, meta: Metadata, slots: list[Slot]) -> Metadata | None:
        """Return the metadata for a reply sent by a thread; None if only the loop can. See `replies_in_thread`."""
        ((key, value),) = meta.items()
        added = self._by_key[key].reply_sent_in_thread(peer, value, slots)
        return None if added is None else {key: added}

    def reply_received(self, peer: WorkerInfo, meta: Metadata, slots: list[Any]) -> None:
        for key, value in meta.items():
            (self._by_key.get(key) or self._unknown(key)).reply_received(peer, value, slots)

    @staticmethod
    def _unknown(key: str) -> Interceptor:
        raise ProtocolError(f"metadata of the unknown feature {key!r}")
