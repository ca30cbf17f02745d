"""A request whose function runs in a thread, from the call to the reply."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import torch
from torch._C import _len_torch_function_stack as _count_function_modes

from arpc import torchstate
from arpc.agent.server.run import Run
from arpc.agent.server.thread_replies import ThreadReplies
from arpc.user_errors import close_coroutine
from arpc.wire.values.content import Content
from arpc.wire.values.packing import Slot

__all__ = ["ThreadJob"]

# Of the requests for a quick function, one in 16 is measured: those whose id has none of these bits
_UNMEASURED: Final = 15
_clock = time.perf_counter
_is_grad_enabled = torch.is_grad_enabled


class ThreadJob(msgspec.Struct):
    """Calls the function of a request in a thread. Either the thread answers the request, or the loop in `finish`."""

    run: Run
    replies: ThreadReplies | None = None
    """The outbox for the reply, if the thread may send it."""
    result: Any = None
    error: BaseException | None = None
    content: Content | None = None
    """The encoded result, if the thread has encoded it."""
    pickled: tuple[bytes, list[Slot]] | None = None
    """The pickle and the slots of the result, if the thread has made them and the loop does the rest."""

    def work(self) -> Callable[[], None] | ThreadReplies | None:
        """Call the function, in a thread."""
        run = self.run
        # read before the check, because a run that ends sets `ended` before it drops them
        args, kwargs, context = run.args, run.kwargs, run.context
        if run.ended:
            return run.leave_window if run.is_counted else None  # cancelled while it waited for a thread
        results = run.function.results
        if results.ignored_up_to_bytes < 0 and not run.is_counted and (results.are_large or run.host.threads.is_ahead):
            return self._postpone
        return context.run(self._call, args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Callable[[], None] | ThreadReplies:
        """Call the function in the context of the request, and pickle its result there, too."""
        run, replies = self.run, self.replies
        call, quickness = run.function.call, run.function.quickness
        run.args, run.kwargs = (), None
        # Some calls of quick functions are measured, to see that these are still quick
        begin = 0.0 if quickness.is_quick and run.id & _UNMEASURED else _clock()
        try:
            result = call(*args, **kwargs) if kwargs else call(*args)
        except BaseException as error:  # noqa: BLE001 - any error is sent to the caller
            self.error = error
            result = replies = None
        # Its `with` blocks have ended. Users change only two settings without a block: grad mode and default device.
        if not _is_grad_enabled() or _count_function_modes():
            torchstate.save_and_reset()
        if begin:
            quickness.measured(_clock() - begin)
        # calls that it made may not have been sent yet, and the reply must not overtake them
        if replies is not None and not run.has_called and run.nested is None and replies.put(self, result):
            return replies
        if run.creation is not None or (self.content is None and self.error is None):
            self.result = result
        return self.finish

    def _postpone(self) -> None:
        """Queue the job, because it came to a thread before the likely size of its result was known."""
        if not self.run.ended:
            self.run.host.queue_of(self.run.inbound).submit(self)

    def finish(self) -> None:
        """Do, on the loop, what is left to be done."""
        run = self.run
        if run.has_called:
            # the loop may collect finished jobs before it begins the calls that these have made
            run.has_called = False
            run.host.loop.call_soon(torchstate.run_with, torchstate.DEFAULTS, self.finish)
            return
        if run.is_counted:
            run.leave_window()
        replies = run.host.replies
        result, error, content = self.result, self.error, self.content
        self.result = self.error = self.content = None  # the job may be kept for a while, and they may be large
        if run.ended:
            close_coroutine(result)  # it was cancelled meanwhile
        elif error is not None:
            replies.raised(run, error)
        elif content is not None:
            run.keep(result)
            replies.end(run, content)
        elif self.pickled is not None:
            replies.pickled(run, *self.pickled)
        else:
            replies.returned(run, result)
