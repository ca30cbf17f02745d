"""The requests of one connection that have not been answered yet."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from arpc.agent.client.deadlines import NEVER, Deadlines
from arpc.agent.server.functions import Function
from arpc.agent.server.reply_window import ReplyWindow, ResultSizes
from arpc.ids import WorkerInfo
from arpc.transport.connection import BulkSend, Connection
from arpc.wire.messages import Message, RequestFlag

if TYPE_CHECKING:
    from arpc.agent.server.run import Run
    from arpc.agent.server.thread_replies import ThreadReplies

__all__ = ["Inbound"]


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
        self.functions: dict[int, Function | Exception] = {}
        """By number; an exception says why a function cannot be called."""
        self.limit = max_handlers
        """How many requests may run at once."""
        self.running: dict[int, Run] = {}
        self.is_full = False
        """No more requests may run, or others wait already."""
        self.latest_id = -1
        """The last request that came: the same one again is a message that came twice."""
        self.waiting: dict[int, tuple[Message, float]] = {}
        """Requests that must wait, and since when."""
        self._for_handlers: OrderedDict[int, None] = OrderedDict()
        """Those of them that wait because too many others run, or its caller does not take small replies."""
        self.reply_window: ReplyWindow | None = None
        """Where requests wait whose results are likely to be large, from the first such on."""
        self.results_by_value = ResultSizes()
        """Those of functions that come with their arguments, of which none is known to have been called before."""
        self.waiting_bytes = 0
        self.arrived_ns: dict[int, int] = {}
        """When requests came, by id, while there is a meter."""
        self._deadlines = deadlines
        self._time = connection.loop.time
        self._by_tick: dict[int, dict[int, Run]] = {}
        self._usual_ms = 0
        self._usual_tick = NEVER
        self._usual_until = 0.0
        self._usual_bucket: dict[int, Run] = {}
        self._replies: dict[int, BulkSend] = {}
        self.thread_replies: ThreadReplies | None = None
        """Where threads put what they answer without the loop, from the first time that one could."""

    def results_of(self, message: Message) -> ResultSizes | None:
        """The results of what a request calls; None if it does not wait for these to be taken."""
        if message.flags & RequestFlag.STREAM:
            return None  # it has a window of its own
        function = self.functions.get(message.arg)
        if function.__class__ is Function:
            return function.results
        return None if message.arg else self.results_by_value

    def set_limit(self, max_handlers: int) -> None:
        """Let that many requests run at once."""
        self.limit = max_handlers
        self.look_for_room()

    def look_for_room(self) -> None:
        """See whether requests may run at once again."""
        self.is_full = bool(self._for_handlers) or len(self.running) >= self.limit

    @property
    def has_room_for_waiting(self) -> bool:
        """A request waits for a handler that may have one now."""
        return bool(self._for_handlers) and len(self.running) < self.limit

    @property
    def is_waited_for(self) -> bool:
        """Requests wait, packed or not."""
        return bool(self.waiting) or (self.reply_window is not None and self.reply_window.is_waited_for)

    # -- requests that wait

    def keep(self, message: Message) -> None:
        """Keep a request packed for now, until `take_waiting`."""
        self.waiting[message.id] = message, self._time()
        self.waiting_bytes += message.size_bytes

    def wait_for_handler(self, call_id: int) -> None:
        """Let a request that is kept wait until others have ended."""
        self._for_handlers[call_id] = None
        self.is_full = True

    def next_waiting(self) -> Message | None:
        """The request that has waited longest for a handler."""
        id_, _ = self._for_handlers.popitem(last=False)
        self.look_for_room()
        return self.take_waiting(id_)

    def take_waiting(self, call_id: int) -> Message | None:
        """A request that waits, with the time it has left; None if it was cancelled."""
        message, since = self.waiting.pop(call_id, (None, 0.0))
        if message is not None:
            self.waiting_bytes -= message.size_bytes
            if message.timeout_ms:
                message.timeout_ms = max(1, message.timeout_ms - int((self._time() - since) * 1000))
        return message

    # -- requests that run

    @property
    def is_busy(self) -> bool:
        """Whether requests run or wait, or answers of threads wait to be written."""
        replies = self.thread_replies
        return bool(self.running or self.waiting or (replies is not None and replies.has_unsent))

    def register(self, run: Run) -> None:
        """Keep a request that did not end at once, so that it can be cancelled and expire."""
        if run.is_registered:
            return
        run.is_registered = True
        running = self.running
        running[run.id] = run
        if len(running) >= self.limit:
            self.is_full = True
        timeout_ms = run.timeout_ms
        if timeout_ms:
            now = self._time()
            if timeout_ms != self._usual_ms or now >= self._usual_until:
                self._find_tick(timeout_ms, now)
            run.bucket = bucket = self._usual_bucket
            bucket[run.id] = run
            if run.due is None:
                run.due = now + timeout_ms / 1000

    def _find_tick(self, timeout_ms: int, now: float) -> None:
        """Requests of about the same time with the same timeout share a tick: find it once for all."""
        timeout_s = timeout_ms / 1000
        self._usual_ms = timeout_ms
        self._usual_tick = tick = self._deadlines.tick(now, timeout_s)
        self._usual_until = self._deadlines.time_of(tick) - timeout_s
        bucket = self._by_tick.get(tick)
        if bucket is None:
            bucket = self._by_tick[tick] = {}
            self._deadlines.watch(tick, self)
        self._usual_bucket = bucket

    def claim(self, run: Run) -> bool:
        """Take a request out; True for the one that does, which then answers it. Called in any thread."""
        id_ = run.id
        if self.running.pop(id_, None) is not run:
            return False
        if run.bucket is not None:
            run.bucket.pop(id_, None)
        return True

    def forget(self, run: Run) -> None:
        """A request has been answered."""
        self.running.pop(run.id, None)
        if self.is_full:
            self.look_for_room()
        if run.bucket is not None:
            run.bucket.pop(run.id, None)

    def expire(self, tick: int) -> None:
        if tick == self._usual_tick:
            self._usual_ms = 0
        bucket = self._by_tick.pop(tick, {})
        expired = list(bucket.values())
        bucket.clear()  # they refer to it
        for run in expired:
            run.expire()

    def cancel(self, call_id: int) -> None:
        """The caller does not want a request any more, or its answer."""
        run = self.running.get(call_id)
        if run is not None:
            run.cancel()
        elif self.take_waiting(call_id) is not None:
            self._for_handlers.pop(call_id, None)
            self.arrived_ns.pop(call_id, None)
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
        self._for_handlers.clear()
        self.arrived_ns.clear()
        self.waiting_bytes = 0
        self.look_for_room()
        for run in list(self.running.values()):
            run.cancel()
        # nobody waits for those that go on, and a deadline may be far away: until then it would keep the connection
        for tick in self._by_tick:
            self._deadlines.unwatch(tick, self)
