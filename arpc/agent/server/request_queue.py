"""The request queue of one connection, for a caller that has too many requests running or does not read results.

Requests wait pickled. A result that its caller has not read yet occupies memory on this worker. So a request whose
function has returned large results before begins only while less than `RpcOptions.window_bytes` of results wait to be
read. Requests of all other functions overtake it. At most as many of these plain functions as there are threads are
passed to the thread pool, so that a small function that comes later has no more than these before it.

Handlers may wait for each other, so they must be able to run at the same time: results of running handlers are not
counted in advance, except for those that begin in this turn of the loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from arpc import torchstate
from arpc.agent.server.functions import Mode, ResultSizes
from arpc.agent.server.inbound import Inbound
from arpc.agent.server.thread_job import ThreadJob
from arpc.errors import OverloadedError, WireError
from arpc.wire.messages import FailureKind, Message, RequestFlag

if TYPE_CHECKING:
    from arpc.agent.server.dispatcher import Dispatcher

__all__ = ["RequestQueue"]

# A caller keeps to its own window, or to twice that for small calls, and its options may differ
_WINDOWS: Final = 16
_STREAM: Final = int(RequestFlag.STREAM)
_now_ns = time.perf_counter_ns

_Start = Callable[[], None]


class RequestQueue:
    """The requests of one connection that have to wait. Belongs to the loop."""

    def __init__(self, host: Dispatcher, inbound: Inbound) -> None:
        self._host = host
        self._inbound = inbound
        self._connection = inbound.connection
        self._for_loop: deque[tuple[ResultSizes, _Start]] = deque()
        """Coroutines that wait for room for their results."""
        self._for_threads: deque[tuple[ResultSizes, _Start]] = deque()
        """Plain functions that wait for room for their results."""
        self._begun_in_threads = 0
        self._about_to_begin_bytes = 0
        """The expected results of coroutines that were started or resumed, and have not had their turn yet."""
        self._will_readmit = False

    # -- requests

    def admit(self, message: Message) -> None:
        """Start a request, or queue it, still pickled, if its caller does not read replies or has too many running."""
        host, inbound = self._host, self._inbound
        function = inbound.function_of(message)
        is_large = function.results.are_large and not message.flags & _STREAM  # a stream has its own window
        if not (is_large or inbound.is_full or self._connection.is_congested):
            host.start(inbound, message)
            return
        if host.observers.installed:
            host.observers.accepted(inbound, message)
        is_crowded = len(inbound.waiting) >= host.options.max_requests_waiting and (is_large or inbound.is_full)
        if is_crowded or inbound.waiting_bytes > _WINDOWS * host.options.window_bytes:
            self._refuse(message)
            return
        inbound.waiting[message.id] = message, _now_ns()
        inbound.waiting_bytes += message.size_bytes
        if is_large:
            # a function that comes with its arguments is not known yet: it waits again if it needs a thread
            in_thread = function.mode is Mode.THREAD
            self.enter(function.results, partial(self._start_large, message.id, in_thread), in_thread=in_thread)
        else:
            self._wait_for_handler(message.id)
            self._start_waiting()

    def _refuse(self, message: Message) -> None:
        """Refuse a request of a caller that has too many waiting already."""
        host, inbound = self._host, self._inbound
        host.calls_refused += 1
        text = f"{len(inbound.waiting)} of its requests wait"
        error = OverloadedError(f"{text} already")
        host.observers.dropped(inbound, message.id, error)
        if self._connection.is_congested:
            # the refusals would take as much memory as the requests
            self._connection.abort(WireError(f"{text}, and it does not read replies"))
        else:
            host.replies.fail(inbound, message.id, FailureKind.OVERLOADED, error)

    def _wait_for_handler(self, call_id: int) -> None:
        """Let a queued request wait until others have ended."""
        self._inbound.for_handlers[call_id] = None
        self._inbound.is_full = True

    def _start_waiting(self) -> None:
        connection, inbound = self._connection, self._inbound
        while (
            inbound.for_handlers
            and len(inbound.running) < inbound.limit
            and not (connection.is_congested and connection.unsent_small_bytes > self._host.options.window_bytes)
            and not self._host.is_closed
        ):
            call_id, _ = inbound.for_handlers.popitem(last=False)
            inbound.look_for_room()
            self._start(call_id)

    def _start(self, call_id: int, *, is_counted: bool = False) -> bool:
        """Start a queued request, with the rest of its timeout; False if it was cancelled."""
        message, arrived_ns = self._inbound.take_waiting(call_id)
        if message is None:
            return False
        if message.timeout_ms:
            message.timeout_ms = max(1, message.timeout_ms - (_now_ns() - arrived_ns) // 1_000_000)
        self._host.start(self._inbound, message, arrived_ns, is_counted=is_counted)
        return True

    def readmit(self) -> None:
        """Start queued requests, as far as there is room, because another has ended or a reply was sent."""
        if not torchstate.is_pristine():
            # a suspended task, in a no_grad() block, say, has left its torch state on this thread
            torchstate.run_with(torchstate.DEFAULTS, self.readmit)
            return
        self._will_readmit = False
        self._inbound.look_for_room()
        self._start_waiting()
        self._admit_large()

    def readmit_soon(self) -> None:
        """Look for room in the next turn of the loop."""
        if not self._will_readmit:
            self._will_readmit = True
            self._connection.loop.call_soon(self.readmit)

    # -- large results

    @property
    def is_waited_for(self) -> bool:
        """Whether a request waits for room for its result."""
        return bool(self._for_loop or self._for_threads)

    def enter(self, results: ResultSizes, start: _Start, *, in_thread: bool) -> None:
        """Call ``start`` when there is room, maybe at once. ``in_thread``: `thread_ended` must be called after that."""
        (self._for_threads if in_thread else self._for_loop).append((results, start))
        self._admit_large()

    def _start_large(self, call_id: int, in_thread: bool) -> None:
        """Start a queued request, for whose result there is room now."""
        inbound = self._inbound
        if call_id in inbound.waiting and len(inbound.running) >= inbound.limit:
            self._wait_for_handler(call_id)
            has_begun = False
        else:
            has_begun = not self._host.is_closed and self._start(call_id, is_counted=in_thread)
        if in_thread and not has_begun:
            self.thread_ended()
        if not has_begun:
            # a thread may have answered a request before this one counted as waiting, and so has woken nobody
            self._start_waiting()

    def submit(self, job: ThreadJob) -> None:
        """Pass a plain function to a thread when there is room for its result, or at once if that should be small."""
        run = job.run
        if run.is_counted:
            self._submit_counted(job)
        elif run.function.results.are_large:
            self.enter(run.function.results, partial(self._submit_counted, job), in_thread=True)
        else:
            self._host.threads.submit(job.work, run.function.quickness.is_quick)

    def _submit_counted(self, job: ThreadJob) -> None:
        if job.run.ended:
            self.thread_ended()
            return
        job.run.is_counted = True
        job.replies = None  # the loop must record its end
        self._host.threads.submit(job.work, job.run.function.quickness.is_quick)

    def thread_ended(self) -> None:
        """Record that a plain function that was started has ended, or will not run."""
        self._begun_in_threads -= 1
        if self._for_threads:
            self.readmit_soon()

    def _admit_large(self) -> None:
        waiting = self._for_loop
        while waiting and self._has_room(waiting[0][0]):
            self._start_on_loop(*waiting.popleft())
        waiting = self._for_threads
        while waiting and self._begun_in_threads < self._host.threads.size and self._has_room(waiting[0][0]):
            self._begun_in_threads += 1
            waiting.popleft()[1]()
        self._connection.bulk_left = self.readmit_soon if self.is_waited_for else None

    def _start_on_loop(self, results: ResultSizes, start: _Start) -> None:
        """Start a coroutine. Unless it sends its result at once, that counts in advance until the next turn."""
        connection = self._connection
        held_bytes = connection.held_bytes
        start()
        if connection.held_bytes == held_bytes:
            self._about_to_begin_bytes += results.expected_bytes
            connection.loop.call_soon(self._has_begun, results.expected_bytes)

    def _has_begun(self, expected_bytes: int) -> None:
        self._about_to_begin_bytes -= expected_bytes
        if self.is_waited_for:
            self.readmit_soon()

    def _has_room(self, results: ResultSizes) -> bool:
        connection, window_bytes = self._connection, self._host.options.window_bytes
        # A result that does not fit into the window at all need not wait until the window is empty
        expected_bytes = min(results.expected_bytes, window_bytes // 2)
        held_bytes = connection.held_bytes + self._about_to_begin_bytes
        return held_bytes + expected_bytes <= window_bytes and not connection.is_behind
