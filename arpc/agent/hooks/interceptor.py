"""The interface by which a feature takes part in calls."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from arpc.ids import WorkerInfo
from arpc.wire.values.packing import Slot

__all__ = ["Interceptor"]


class Interceptor:
    """A feature that takes part in calls: it sees their tensors, and may add bytes of its own under its `key`.

    Features override the methods that they need; those here do nothing. A ``_sent`` method that returns None adds
    nothing. The peer's ``_received`` method is called only if something was added. ``slots`` may be changed in place. A
    method may raise only if the call cannot go on.
    """

    key: str

    occasions: Sized = ()
    """While this is empty, the interceptor has nothing to add to requests and is not called. Always the same object."""

    replies_in_threads = False
    """Whether `reply_sent_in_thread` is worth calling."""

    def request_sent(self, peer: WorkerInfo, function: Any, slots: list[Slot], is_stream: bool = False) -> bytes | None:
        """Return bytes to add to a request. Called in the caller's context, before it is sent.

        The request for a stream gets an answer for each of its items.
        """

    def request_received(self, peer: WorkerInfo, meta: bytes, slots: list[Any]) -> None:
        """Read the bytes of a request. Called in the handler's own context, before its arguments are unpickled."""

    def reply_sent(self, peer: WorkerInfo, meta: bytes, slots: list[Slot]) -> bytes | None:
        """Return bytes to add to a reply. Called in the handler's context; ``meta`` came with the request."""

    def reply_sent_in_thread(self, peer: WorkerInfo, meta: bytes, slots: list[Slot]) -> bytes | None:
        """Return what `reply_sent` returns. Called in the thread in which a plain function has ended.

        None if only the loop can do that: then `reply_sent` is called there.
        """

    def reply_received(self, peer: WorkerInfo, meta: bytes, slots: list[Any]) -> None:
        """Read the bytes of a reply, before the result is unpickled. Not called in the caller's context."""
