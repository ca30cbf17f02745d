"""What an interceptor offers that rides on nearly every call: short ways for messages on which it rides alone."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from arpc.ids import WorkerInfo

__all__ = ["Noting"]


@runtime_checkable
class Noting(Protocol):
    """An interceptor, see `codec.Interceptor`, all of whose additions are notes: `wire.noted` tells how these travel.

    A worker has one at most. What it adds under its key and its notes are the same bytes, `NOTE_BYTES` of them. Either
    side takes the way that suits it: a call that went out with a note may be answered in the other way.

    Tensors here are just `Tensor`: no parameters, nor others of a class derived from it. Torch's state is pristine in
    all of these but `note_request`.
    """

    key: str

    @property
    def occasions(self) -> Sized:
        """See `Interceptor`."""

    def note_request(self, peer: WorkerInfo, function: Any, tensors: Sequence[Tensor]) -> bytes | None:
        """In the caller's context, as a request leaves. None if there is nothing to say."""

    def request_noted(
        self, peer: WorkerInfo, note: bytearray, tensors: list[Tensor], requiring: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        """In the handler's context: its arguments, see `wire.noted.Noted`."""

    def note_reply(self, peer: WorkerInfo, note: bytearray, result: Tensor) -> bytes | None:
        """In any context, as a reply leaves; ``note`` came with the request. None if there is nothing to say."""

    def reply_noted(
        self, peer: WorkerInfo, note: bytearray, tensors: list[Tensor], requiring: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        """At the caller, in any context: the result, in the same way."""
