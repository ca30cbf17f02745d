"""How a feature takes part in calls."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from arpc.ids import WorkerInfo
from arpc.wire.values.packing import Slot

__all__ = ["Interceptor"]


class Interceptor:
    """A feature that takes part in calls: it sees their tensors, and may add bytes of its own under its `key`.

    Features define what they need; all methods here do nothing. A ``_sent`` method that returns None adds nothing. The
    other side's ``_received`` method is called only if something came. ``slots`` may be changed in place. Nothing here
    may raise for another reason than that the call cannot go on.
    """

    key: str

    occasions: Sized = ()
    """While this is empty, the interceptor has nothing to add and is not asked. Always the same object."""

    replies_in_threads = False
    """Whether `reply_sent_in_thread` is worth asking."""

    def request_sent(self, peer: WorkerInfo, function: Any, slots: list[Slot], is_stream: bool = False) -> bytes | None:
        """In the caller's context, before a request leaves. A stream has an answer for each of its items."""

    def request_received(self, peer: WorkerInfo, meta: bytes, slots: list[Any]) -> None:
        """In the handler's own context, before its arguments are built."""

    def reply_sent(self, peer: WorkerInfo, meta: bytes, slots: list[Slot]) -> bytes | None:
        """In the handler's context; ``meta`` is what came with the request."""

    def reply_sent_in_thread(self, peer: WorkerInfo, meta: bytes, slots: list[Slot]) -> bytes | None:
        """What `reply_sent` returns, asked in the thread in which a plain function has ended.

        None if that takes the loop: then `reply_sent` is asked there.
        """

    def reply_received(self, peer: WorkerInfo, meta: bytes, slots: list[Any]) -> None:
        """At the caller, before the result is built. Not in the caller's context."""
