"""The record of one worker for a trace."""

from __future__ import annotations

import msgspec

from arpc.profiler.operators import Operator

__all__ = ["Span", "WorkerRecord"]


class Span(msgspec.Struct, array_like=True):
    """A call, a handler or another activity of one worker, in the form in which it is sent.

    Times are by ``time.perf_counter_ns`` of that worker, until the trace is put together.
    """

    role: str
    """``call``: this worker waited for another; ``handler``: it worked for another; ``activity``: neither."""
    kind: str
    """The value of an `arpc.agent.hooks.observers.Kind`."""
    name: str
    start_ns: int
    end_ns: int
    number: int
    """The number of this span, unique on its worker."""
    parent: int = 0
    """The number of the handler that made this call; 0 if it was made by the worker's own code."""
    peer: str = ""
    """The callee of a call, or the caller of a handler."""
    call_id: int = 0
    """The id of the call: the same on both sides, and unique among calls of one worker to another at that time."""
    accepted_ns: int = 0
    """The arrival of a handler's request. The request may have waited before the handler began."""
    outcome: str = ""
    sent_bytes: int = 0
    received_bytes: int = 0
    operators: list[Operator] = []
    """The operators that it ran."""

    def moved(self, by_ns: int) -> Span:
        """Return this span on another clock."""
        return msgspec.structs.replace(
            self,
            start_ns=self.start_ns + by_ns,
            end_ns=self.end_ns + by_ns,
            accepted_ns=self.accepted_ns + by_ns if self.accepted_ns else 0,
            operators=[operator.moved(by_ns) for operator in self.operators],
        )


class WorkerRecord(msgspec.Struct, array_like=True):
    """Everything that one worker recorded."""

    name: str
    id: int
    process: int
    host: str
    spans: list[Span]
    operators: list[Operator]
    """The operators that it ran outside of any span."""
    touched: list[str]
    """The workers to which it passed the trace on."""
    dropped: int = 0
    """The number of spans for which there was no more room."""

    def packed(self) -> bytes:
        """Return the record as msgpack, for a reply."""
        return _encode(self)

    @classmethod
    def unpacked(cls, data: bytes) -> WorkerRecord:
        """Decode a record. Raises `msgspec.DecodeError`."""
        return _decode(data)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(WorkerRecord).decode
