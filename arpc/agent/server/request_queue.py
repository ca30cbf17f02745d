"""Requests that wait: because their caller has too many others running, or does not read the replies of those before.

Requests wait packed. What is likely to return a large result waits for the `ReplyWindow` of its connection.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from arpc import torchstate
from arpc.agent.server.functions import Function, Mode
from arpc.agent.server.inbound import Inbound
from arpc.agent.server.reply_window import ReplyWindow
from arpc.agent.server.thread_job import ThreadJob
from arpc.errors import OverloadedError, WireError
from arpc.options import RpcOptions
from arpc.wire.messages import FailureKind, Message, RequestFlag

if TYPE_CHECKING:
    from arpc.agent.server.dispatcher import Dispatcher

__all__ = ["RequestQueue"]

# A caller keeps to its own window, twice of it for what is small; and its options may not be the same
_WINDOWS: Final = 16
_STREAM: Final = int(RequestFlag.STREAM)
_THREAD: Final = Mode.THREAD


class RequestQueue:
    """The waiting requests of all peers of one worker."""

    def __init__(self, host: Dispatcher, options: RpcOptions) -> None:
        self._host = host
        self._max_waiting = options.max_requests_waiting
        self._window_bytes = options.window_bytes
        self.calls_refused = 0
        self.is_closed = False

    def admit(self, inbound: Inbound, message: Message) -> None:
        """Start a request, or keep it packed while its caller does not take replies or has too many others running."""
        function = inbound.function_of(message)
        is_large = function.results.are_large and not message.flags & _STREAM  # which has a window of its own
        if not (is_large or inbound.is_full or inbound.connection.is_congested):
            self._host.start(inbound, message)
            return
        if self._host.is_watched:
            self._host.note_arrival(inbound, message)
        if (
            len(inbound.waiting) < self._max_waiting or not (is_large or inbound.is_full)
        ) and inbound.waiting_bytes <= _WINDOWS * self._window_bytes:
            if is_large:
                self._keep_for_window(inbound, message, function)
            else:
                inbound.keep(message)
                inbound.wait_for_handler(message.id)
                self._start_waiting(inbound)
        else:
            self._refuse(inbound, message)

    def _refuse(self, inbound: Inbound, message: Message) -> None:
        """Answer a call of a caller too many of whose calls wait already."""
        self.calls_refused += 1
        error = OverloadedError(f"{len(inbound.waiting)} of its requests wait already")
        self._host.observers.dropped(inbound, message.id, error)
        if inbound.connection.is_congested:
            # to refuse them all would take as much memory as to keep them
            text = f"{len(inbound.waiting)} of its requests wait, and it does not read replies"
            inbound.connection.abort(WireError(text))
        else:
            self._host.replies.fail(inbound, message.id, FailureKind.OVERLOADED, error)

    # -- large results

    def window(self, inbound: Inbound) -> ReplyWindow:
        """Where requests of a connection wait whose results are likely to be large."""
        if inbound.reply_window is None:
            inbound.reply_window = ReplyWindow(
                inbound.connection, self._window_bytes, self._host.threads.size, partial(self.readmit, inbound)
            )
        return inbound.reply_window

    def _keep_for_window(self, inbound: Inbound, message: Message, function: Function) -> None:
        # one that comes with its arguments is not known yet: it waits again if it is for a thread
        in_thread = function.mode is _THREAD
        window = self.window(inbound)

        def start() -> None:
            if len(inbound.running) >= inbound.limit and message.id in inbound.waiting:
                inbound.wait_for_handler(message.id)
                kept = None
            else:
                kept = None if self.is_closed else inbound.take_waiting(message.id)
            if kept is not None:
                self._host.start(inbound, kept, is_counted=in_thread)
            elif in_thread:  # it was cancelled, or waits for another reason
                window.thread_ended()

        inbound.keep(message)
        window.enter(function.results, start, in_thread=in_thread)

    def postpone(self, job: ThreadJob) -> None:
        """Let a plain function have a thread when there is room for its result, or at once if that will be small."""
        run = job.run
        if not run.function.results.are_large:
            self._host.threads.submit(job.work, run.function.quickness.is_quick)
            return
        window = self.window(run.inbound)

        def start() -> None:
            if run.ended:
                window.thread_ended()
            else:
                self.submit_counted(job)

        window.enter(run.function.results, start, in_thread=True)

    def submit_counted(self, job: ThreadJob) -> None:
        """Let a plain function that the reply window has let go have a thread."""
        job.run.is_counted = True
        job.replies = None  # the loop is to hear of its end
        self._host.threads.submit(job.work, job.run.function.quickness.is_quick)

    # -- room

    def readmit(self, inbound: Inbound) -> None:
        """Start requests that wait, as far as there is room: something has ended or was sent."""
        if not torchstate.is_pristine():
            # the loop is between two steps of a task that has switched something off for itself
            torchstate.run_with(torchstate.DEFAULTS, self.readmit, inbound)
            return
        inbound.look_for_room()
        self._start_waiting(inbound)
        if inbound.reply_window is not None:
            inbound.reply_window.admit()

    def _start_waiting(self, inbound: Inbound) -> None:
        connection = inbound.connection
        while (
            inbound.has_room_for_waiting
            and not (connection.is_congested and connection.unsent_small_bytes > self._window_bytes)
            and not self.is_closed
        ):
            message = inbound.next_waiting()
            if message is not None:
                self._host.start(inbound, message)
