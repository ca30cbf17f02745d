"""The requests of one connection that have not been answered yet."""

from __future__ import annotations

from collections import OrderedDict
from math import inf
from typing import TYPE_CHECKING, Final

from arpc.agent.client.deadlines import NEVER, Deadlines
from arpc.agent.server.functions import Function
from arpc.errors import ProtocolError
from arpc.ids import WorkerInfo
from arpc.transport.connection import BulkSend, Connection
from arpc.wire.messages import Message

if TYPE_CHECKING:
    from arpc.agent.server.request_queue import RequestQueue
    from arpc.agent.server.run import Run
    from arpc.agent.server.thread_replies import ThreadReplies

__all__ = ["Inbound"]

_LATENESS: Final = 1 / 64 / 1000
"""How late `Deadlines.tick` may be: seconds for each millisecond of a timeout."""
_PAUSE_S: Final = 5e-6
"""For each request that runs, so long is waited between two looks for those that have expired."""


class Inbound:
    """What one connection asked for: functions by number, requests that run, requests that wait."""

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
        """By number. Those that come with their arguments have none, and share what is known of their results."""
        self.limit = max_handlers
        """How many requests may run at once."""
        self.running: dict[int, Run] = {}
        self.is_full = False
        """No more requests may run, or others wait already."""
        self.latest_id = -1
        """The last request that came: the same one again is a message that came twice."""
        self.waiting: dict[int, tuple[Message, int]] = {}
        """Requests that must wait, and when they came, by the clock of `time.perf_counter_ns`."""
        self.waiting_bytes = 0
        self.for_handlers: OrderedDict[int, None] = OrderedDict()
        """Those of them that wait because too many others run, or its caller does not take small replies."""
        self.queue: RequestQueue | None = None
        """Lets them wait, from the first one on."""
        self._deadlines = deadlines
        self._time = connection.loop.time
        self._look_at = inf
        """When to look for requests that have expired. -inf once the connection has ended: never again."""
        self._tick = NEVER
        """The tick of that time."""
        self._replies: dict[int, BulkSend] = {}
        self.thread_replies: ThreadReplies | None = None
        """Where threads put what they answer without the loop, from the first time that one could."""

    def function_of(self, message: Message) -> Function:
        """The function that a request calls."""
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
        """See whether requests may run at once again."""
        self.is_full = bool(self.for_handlers) or len(self.running) >= self.limit

    def take_waiting(self, call_id: int) -> tuple[Message | None, int]:
        """A request that waits, and when it came; None and 0 if it was cancelled."""
        message, arrived_ns = self.waiting.pop(call_id, (None, 0))
        if message is not None:
            self.waiting_bytes -= message.size_bytes
        return message, arrived_ns

    # -- requests that run

    @property
    def is_busy(self) -> bool:
        """Whether requests run or wait, or answers of threads wait to be written."""
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
            # Most have the timeout of others before them, and the look for those comes soon enough
            if due + run.timeout_ms * _LATENESS < self._look_at:
                self._look_for_expired(due)

    def _look_for_expired(self, due: float) -> None:
        """Look for requests that have expired soon after that time, or before. Most will have ended by then."""
        deadlines, now = self._deadlines, self._time()
        tick = deadlines.tick(now, due - now)
        look_at = deadlines.time_of(tick)  # up to 1/64 of the time away from ``due``
        if look_at < self._look_at:
            deadlines.unwatch(self._tick, self)
            self._tick, self._look_at = tick, look_at
            deadlines.watch(tick, self)

    def expire(self, tick: int) -> None:
        """End the requests whose deadline has passed, and find out when the next one will."""
        now = self._time()
        self._look_at = next_due = inf
        for run in list(self.running.values()):
            if run.due is None or run.expired:
                continue  # it has no deadline, or has been cancelled for it and goes on
            if run.due <= now:
                run.expire()
            else:
                next_due = min(next_due, run.due)
        if next_due < self._look_at:
            # Each look goes over all that run: with thousands of them it must not become all that the loop does
            self._look_for_expired(max(next_due, now + _PAUSE_S * len(self.running)))

    def claim(self, run: Run) -> bool:
        """Take a request out; True for the one that does, which then answers it. Called in any thread."""
        return self.running.pop(run.id, None) is run

    def forget(self, run: Run) -> None:
        """A request has been answered."""
        self.running.pop(run.id, None)
        if self.is_full:
            self.look_for_room()

    def cancel(self, call_id: int) -> None:
        """The caller does not want a request any more, or its answer."""
        run = self.running.get(call_id)
        if run is not None:
            run.cancel()
        elif self.take_waiting(call_id)[0] is not None:
            self.for_handlers.pop(call_id, None)
            self.look_for_room()
        elif (bulk := self._replies.pop(call_id, None)) is not None:
            self.connection.drop_bulk(bulk)  # the reply is on its way, and nobody wants it any more

    def reply_leaves(self, call_id: int, bulk: BulkSend) -> None:
        """A reply with large tensors is on its way, and may still be cancelled."""
        for sent in [key for key, earlier in self._replies.items() if earlier.is_sent]:
            del self._replies[sent]
        self._replies[call_id] = bulk

    def output_drained(self) -> None:
        """The caller takes bytes again: streams may go on."""
        for run in list(self.running.values()):
            if run.producer is not None:
                run.producer.wake()

    def add_credit(self, call_id: int, items: int) -> None:
        """The consumer of a stream takes more items. It has had some already, so the producer is there."""
        run = self.running.get(call_id)
        if run is not None and run.producer is not None:
            run.producer.add_credit(items)

    def cancel_all(self) -> None:
        """The connection has ended."""
        self.waiting.clear()
        self.for_handlers.clear()
        self.waiting_bytes = 0
        self.look_for_room()
        for run in list(self.running.values()):
            run.cancel()
        # nobody waits for those that go on, and a deadline may be far away: until then it would keep the connection
        self._deadlines.unwatch(self._tick, self)
        self._look_at = -inf
