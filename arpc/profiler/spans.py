"""What a worker writes down for a trace."""

from __future__ import annotations

import msgspec

from arpc.profiler.operators import Operator

__all__ = ["Span", "WorkerRecord"]


class Span(msgspec.Struct, array_like=True):
    """Something that took time on one worker. This is how it travels.

    Times are those of ``time.perf_counter_ns`` on that worker, until the trace is put together.
    """

    role: str
    """``call``: this worker waited for another; ``handler``: it worked for another; ``activity``: neither."""
    kind: str
    """An `arpc.agent.observers.Kind`."""
    name: str
    start_ns: int
    end_ns: int
    number: int
    """Of this span, on its worker."""
    parent: int = 0
    """The number of the handler that made this call; 0 if it was made by the worker's own code."""
    peer: str = ""
    """Who was called, or called."""
    call_id: int = 0
    """Both sides of a call have it, and no other call at the same time."""
    accepted_ns: int = 0
    """Of a handler: when the request came. It may have waited before it began."""
    outcome: str = ""
    sent_bytes: int = 0
    received_bytes: int = 0
    operators: list[Operator] = []
    """What it ran."""

    def moved(self, by_ns: int) -> Span:
        """This span on another clock."""
        return msgspec.structs.replace(
            self,
            start_ns=self.start_ns + by_ns,
            end_ns=self.end_ns + by_ns,
            accepted_ns=self.accepted_ns + by_ns if self.accepted_ns else 0,
            operators=[operator.moved(by_ns) for operator in self.operators],
        )


class WorkerRecord(msgspec.Struct, array_like=True):
    """All that one worker wrote down."""

    name: str
    id: int
    process: int
    host: str
    spans: list[Span]
    operators: list[Operator]
    """What it ran outside of any span."""
    touched: list[str]
    """Whom it told of the trace."""
    dropped: int = 0
    """Spans there was no more room for."""

    def packed(self) -> bytes:
        """For a reply."""
        return _encode(self)

    @classmethod
    def unpacked(cls, data: bytes) -> WorkerRecord:
        """Raises `msgspec.DecodeError`."""
        return _decode(data)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(WorkerRecord).decode
