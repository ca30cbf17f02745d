"""Large results wait for room before they are made, so that small ones never wait behind them.

A result that its caller has not taken yet occupies memory here. So a request whose function has returned large results
before begins only while less than `RpcOptions.window_bytes` of results wait to be taken. Requests of all other
functions pass it. At most as many plain functions as there are threads are handed to the thread pool, so that a small
function that comes later has no more than these before it.

Handlers may wait for each other, so they must be able to begin together: results of those that run are not counted in
advance, but for those that begin in this turn of the loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from arpc.transport.connection import SMALL_MESSAGE_BYTES, Connection

__all__ = ["ReplyWindow", "ResultSizes"]

_WEIGHT: Final = 8
"""A function whose results become small counts as large for some more of them, about 30 after one of 4 MB."""

_Start = Callable[[], None]


class ResultSizes:
    """How large the results of a function have been of late, which is what tells how large the next one will be."""

    __slots__ = ("are_large", "expected_bytes", "unsurprising_bytes")

    def __init__(self) -> None:
        self.expected_bytes = 0
        self.are_large = False
        self.unsurprising_bytes = -1
        """A result of at most that size tells nothing new. Negative as long as they are not known to be small."""

    def saw(self, size_bytes: int) -> None:
        """Count a result."""
        expected_bytes = self.expected_bytes
        if size_bytes < expected_bytes:
            size_bytes = expected_bytes - max(1, (expected_bytes - size_bytes) // _WEIGHT)
        self.expected_bytes = size_bytes
        self.are_large = size_bytes > SMALL_MESSAGE_BYTES
        self.unsurprising_bytes = -1 if self.are_large else SMALL_MESSAGE_BYTES


class ReplyWindow:
    """What waits for room on the way to one peer. Belongs to the loop."""

    def __init__(self, connection: Connection, window_bytes: int, threads: int, admit: Callable[[], None]) -> None:
        """``admit`` is called, soon after there may be room again, to call `admit` in a fit state."""
        self._connection = connection
        self._window_bytes = window_bytes
        self._threads = threads
        self._admit = admit
        self._for_loop: deque[tuple[ResultSizes, _Start]] = deque()
        self._for_threads: deque[tuple[ResultSizes, _Start]] = deque()
        self._begun_in_threads = 0
        self._about_to_begin_bytes = 0
        """What coroutines are going to return that were let go on, or started, and have not had their turn yet."""
        self._will_admit = False

    @property
    def is_waited_for(self) -> bool:
        return bool(self._for_loop or self._for_threads)

    def enter(self, results: ResultSizes, start: _Start, *, in_thread: bool) -> None:
        """Call ``start`` when there is room, which may be at once. ``in_thread``: after that `thread_ended` is due."""
        (self._for_threads if in_thread else self._for_loop).append((results, start))
        self.admit()

    def admit(self) -> None:
        """Start what there is room for."""
        waiting = self._for_loop
        while waiting and self._has_room(waiting[0][0]):
            self._start_on_loop(*waiting.popleft())
        waiting = self._for_threads
        while waiting and self._begun_in_threads < self._threads and self._has_room(waiting[0][0]):
            self._begun_in_threads += 1
            waiting.popleft()[1]()
        self._connection.bulk_left = self.admit_soon if self.is_waited_for else None

    def _start_on_loop(self, results: ResultSizes, start: _Start) -> None:
        """Start a coroutine. Its result counts until the end of this turn if its first step may come only then."""
        connection = self._connection
        held_bytes = connection.held_bytes
        start()
        if connection.held_bytes == held_bytes:
            self._about_to_begin_bytes += results.expected_bytes
            connection.loop.call_soon(self._has_begun, results.expected_bytes)

    def _has_begun(self, expected_bytes: int) -> None:
        self._about_to_begin_bytes -= expected_bytes
        if self.is_waited_for:
            self.admit_soon()

    def _has_room(self, results: ResultSizes) -> bool:
        connection = self._connection
        # One that does not fit into the window at all need not wait until it is empty
        expected_bytes = min(results.expected_bytes, self._window_bytes // 2)
        held_bytes = connection.held_bytes + self._about_to_begin_bytes
        return held_bytes + expected_bytes <= self._window_bytes and not connection.is_behind

    def admit_soon(self) -> None:
        """Look for room in the next turn of the loop."""
        if not self._will_admit:
            self._will_admit = True
            self._connection.loop.call_soon(self._admit_now)

    def _admit_now(self) -> None:
        self._will_admit = False
        self._admit()

    def thread_ended(self) -> None:
        """A plain function that was started has ended, or will not run."""
        self._begun_in_threads -= 1
        if self._for_threads:
            self.admit_soon()
