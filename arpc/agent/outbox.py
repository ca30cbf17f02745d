"""Answers that threads send themselves, without waking the loop.

A plain function that ends in a thread has its answer there. If that is nothing, a number or the like, it needs nothing
of the loop's: it is put into the *outbox* of its connection, and the thread sends what is in there before it goes to
sleep, many answers in one write. The loop sends what a thread leaves behind, because the peer does not take it now or
the thread is stuck in its next function.

Who sends an answer has taken its request out of the connection's table (`Inbound.claim`), which is one step for the
interpreter. A cancellation, a deadline and the end of a connection do the same first, so each request has one end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

from arpc.agent.threads import Outbox
from arpc.errors import ConnectionClosedError
from arpc.transport.base import Connection
from arpc.transport.turns import WriteTurn

__all__ = ["ReplyOutbox"]

_WRITE_BYTES: Final = 1 << 16


class _Requests(Protocol):
    """The requests of a connection, see `requests.Inbound`."""

    @property
    def connection(self) -> Connection: ...
    @property
    def is_full(self) -> bool: ...
    def claim(self, run: Any) -> bool: ...


class ReplyOutbox(Outbox):
    """The outbox of one connection."""

    __slots__ = ("_inbound", "_readmit", "_turn", "answers")

    def __init__(self, inbound: _Requests, turn: WriteTurn, readmit: Callable[[Any], None]) -> None:
        self.answers: deque[tuple[Any, bytes]] = deque()
        """Requests, and the frames that answer them."""
        self._inbound = inbound
        self._turn = turn
        self._readmit = readmit

    def send(self) -> None:
        """Send all there is, in any thread but the loop's."""
        turn = self._turn
        while self.answers:
            with turn.lock:
                if not turn.is_mine:
                    self._leave_to_loop()
                    return
                frames = self._take()
                if frames:
                    turn.send(frames[0] if len(frames) == 1 else b"".join(frames), len(frames))
        # Looked at after requests have been taken out: if it is false now, whoever makes it true sees the room
        if self._inbound.is_full:
            self._leave_to_loop()

    def _leave_to_loop(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._inbound.connection.loop.call_soon_threadsafe(self.send_on_loop)

    def send_on_loop(self) -> None:
        """Send all there is, on the loop."""
        inbound = self._inbound
        while self.answers:
            with self._turn.lock:
                frames = self._take()
            with suppress(ConnectionClosedError):  # then the caller knows
                for data in frames:
                    inbound.connection.send(data)
        if inbound.is_full:
            self._readmit(inbound)

    def _take(self) -> list[bytes]:
        """Some answers, which are sent from now on. Whoever calls holds the turn."""
        answers, claim = self.answers, self._inbound.claim
        frames = []
        size_bytes = 0
        while answers and size_bytes < _WRITE_BYTES:
            run, data = answers.popleft()
            if claim(run):
                frames.append(data)
                size_bytes += len(data)
        return frames
