"""The requests of one connection that have not been answered yet."""

from __future__ import annotations

from collections import OrderedDict
from math import inf
from typing import TYPE_CHECKING, Final

from arpc.agent.client.deadlines import NEVER, Deadlines
from arpc.agent.server.functions import Function
from arpc.errors import ProtocolError
from arpc.ids import WorkerInfo
from arpc.transport.bulk import BulkSend
from arpc.transport.connection import Connection
from arpc.wire.messages import Message

if TYPE_CHECKING:
    from arpc.agent.server.request_queue import RequestQueue
    from arpc.agent.server.run import Run
    from arpc.agent.server.thread_replies import ThreadReplies

__all__ = ["Inbound"]

_LATENESS: Final = 1 / 64 / 1000
"""The most by which `Deadlines.tick` is late: seconds for each millisecond of a timeout."""
_PAUSE_S: Final = 5e-6
"""The least time, for each running request, between two checks for requests that have expired."""


class Inbound:
    """The requests of one connection: functions by number, requests that run, requests that wait."""

    def __init__(
        self,
        connection: Connection,
        caller: WorkerInfo,
        deadlines: Deadlines,
        *,
        max_handlers: int,
        main_by_value: bool,
    ) -> None:
        self.connection = connection
        self.caller = caller
        self.main_by_value = main_by_value
        self.functions = {0: Function.unknown()}
        """The functions by number. Those that come with their arguments share number 0, and their result sizes."""
        self.limit = max_handlers
        """The number of requests that may run at once."""
        self.running: dict[int, Run] = {}
        self.is_full = False
        """Whether further requests must wait: no more may run, or others wait already."""
        self.latest_id = -1
        """The id of the last request. Another message with this id is a duplicate."""
        self.waiting: dict[int, tuple[Message, int]] = {}
        """The requests that must wait, with the times of their arrival by the clock of `time.perf_counter_ns`."""
        self.waiting_bytes = 0
        self.for_handlers: OrderedDict[int, None] = OrderedDict()
        """The ids of those that wait because too many others run, or the caller does not read small replies."""
        self.queue: RequestQueue | None = None
        """The queue that manages them; None until the first request has to wait."""
        self._deadlines = deadlines
        self._time = connection.loop.time
        self._look_at = inf
        """The time of the next check for expired requests. -inf once the connection has ended: never again."""
        self._tick = NEVER
        """The tick of that time."""
        self._replies: dict[int, BulkSend] = {}
        self.thread_replies: ThreadReplies | None = None
        """The outbox for replies that threads send without the loop; None until a thread first may."""

    def function_of(self, message: Message) -> Function:
        """Return the function that a request calls; a placeholder with an error if it was never sent."""
        function = self.functions.get(message.arg)
        if function is None:
            text = f"call {message.id} of function {message.arg}, which was never sent"
            return Function.unknown(ProtocolError(text))
        return function

    def set_limit(self, max_handlers: int) -> None:
        """Let that many requests run at once."""
        self.limit = max_handlers
        self.look_for_room()

    def look_for_room(self) -> None:
        """Update `is_full`: requests may be able to run at once again."""
        self.is_full = bool(self.for_handlers) or len(self.running) >= self.limit

    def take_waiting(self, call_id: int) -> tuple[Message | None, int]:
        """Remove a request that waits; returns it and the time of its arrival, None and 0 if it was cancelled."""
        message, arrived_ns = self.waiting.pop(call_id, (None, 0))
        if message is not None:
            self.waiting_bytes -= message.size_bytes
        return message, arrived_ns

    # -- requests that run

    @property
    def is_busy(self) -> bool:
        """Whether requests run or wait, or replies of threads wait to be written."""
        replies = self.thread_replies
        return bool(self.running or self.waiting or (replies is not None and replies.has_unsent))

    def register(self, run: Run) -> None:
        """Keep a request that did not end at once, so that it can be cancelled and expire."""
        run.is_registered = True
        running = self.running
        running[run.id] = run
        if len(running) >= self.limit:
            self.is_full = True
        if run.timeout_ms:
            due = run.due
            if due is None:
                due = run.due = self._time() + run.timeout_ms / 1000
            # Most have the same timeout as earlier ones, and the check for those comes soon enough
            if due + run.timeout_ms * _LATENESS < self._look_at:
                self._look_for_expired(due)

    def _look_for_expired(self, due: float) -> None:
        """Schedule a check for expired requests soon after ``due``, or before. Most will have ended by then."""
        deadlines, now = self._deadlines, self._time()
        tick = deadlines.tick(now, due - now)
        look_at = deadlines.time_of(tick)  # up to 1/64 of the time away from ``due``
        if look_at < self._look_at:
            deadlines.unwatch(self._tick, self)
            self._tick, self._look_at = tick, look_at
            deadlines.watch(tick, self)

    def expire(self, tick: int) -> None:
        """End the requests whose deadline has passed, and schedule the next check."""
        now = self._time()
        self._look_at = next_due = inf
        for run in list(self.running.values()):
            if run.due is None or run.expired:
                continue  # it has no deadline, or has been cancelled at its deadline and goes on
            if run.due <= now:
                run.expire()
            else:
                next_due = min(next_due, run.due)
        if next_due < self._look_at:
            # Each check visits all running requests: with thousands of them, it must not take all of the loop's time
            self._look_for_expired(max(next_due, now + _PAUSE_S * len(self.running)))

    def claim(self, run: Run) -> bool:
        """Take a request out; True for the one caller that did, which then answers it. Called in any thread."""
        return self.running.pop(run.id, None) is run

    def forget(self, run: Run) -> None:
        """Remove a request that has been answered."""
        self.running.pop(run.id, None)
        if self.is_full:
            self.look_for_room()

    def cancel(self, call_id: int) -> None:
        """Cancel a request, or its reply, because the caller no longer waits for it."""
        run = self.running.get(call_id)
        if run is not None:
            run.cancel()
        elif self.take_waiting(call_id)[0] is not None:
            self.for_handlers.pop(call_id, None)
            self.look_for_room()
        elif (bulk := self._replies.pop(call_id, None)) is not None:
            self.connection.drop_bulk(bulk)  # the reply is being sent, and the caller no longer wants it

    def reply_leaves(self, call_id: int, bulk: BulkSend) -> None:
        """Record a reply with large tensors that is being sent, and may still be cancelled."""
        for sent in [key for key, earlier in self._replies.items() if earlier.is_sent]:
            del self._replies[sent]
        self._replies[call_id] = bulk

    def output_drained(self) -> None:
        """Resume streams, because the caller reads again."""
        for run in list(self.running.values()):
            if run.producer is not None:
                run.producer.wake()

    def add_credit(self, call_id: int, items: int) -> None:
        """Let a stream send more items. Its consumer has received some already, so the producer is there."""
        run = self.running.get(call_id)
        if run is not None and run.producer is not None:
            run.producer.add_credit(items)

    def cancel_all(self) -> None:
        """Cancel all requests, because the connection has ended."""
        self.waiting.clear()
        self.for_handlers.clear()
        self.waiting_bytes = 0
        self.look_for_room()
        for run in list(self.running.values()):
            run.cancel()
        # handlers that go on need no deadline, which may be far away and would keep the connection alive until then
        self._deadlines.unwatch(self._tick, self)
        self._look_at = -inf
