"""A request whose function runs in a thread, from there to its answer."""

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

# Of requests of a quick function, only those with an id that has none of these bits are measured
_UNMEASURED: Final = 15
_clock = time.perf_counter
_is_grad_enabled = torch.is_grad_enabled


class ThreadJob(msgspec.Struct):
    """Calls the function of a request in a thread. Either the thread answers the request, or the loop in `finish`."""

    run: Run
    replies: ThreadReplies | None = None
    """Where the thread may put the answer."""
    result: Any = None
    error: BaseException | None = None
    content: Content | None = None
    """The result as it is sent, if the thread has encoded it."""
    pickled: tuple[bytes, list[Slot]] | None = None
    """The pickle and the slots of the result, if the thread has made them and the loop does the rest."""

    def work(self) -> Callable[[], None] | ThreadReplies | None:
        """Call the function, in a thread."""
        run = self.run
        # taken before the look: a run that ends drops them after it has said so
        args, kwargs, context = run.args, run.kwargs, run.context
        if run.ended:
            return run.leave_window if run.is_counted else None  # cancelled while it waited for a thread
        results = run.function.results
        if results.unsurprising_bytes < 0 and not run.is_counted and (results.are_large or run.host.threads.is_ahead):
            return self._postpone
        return context.run(self._call, args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Callable[[], None] | ThreadReplies:
        """Call the function in its context, in which its result is pickled, too."""
        run, replies = self.run, self.replies
        call, quickness = run.function.call, run.function.quickness
        run.args, run.kwargs = (), None
        # Of those that are known to be quick some are measured, to see that they still are
        begin = 0.0 if quickness.is_quick and run.id & _UNMEASURED else _clock()
        try:
            result = call(*args, **kwargs) if kwargs else call(*args)
        except BaseException as error:  # noqa: BLE001 - whatever it raises is the caller's
            self.error = error
            result = replies = None
        # The blocks it was in have ended with it. Left are the two things that people switch without a block.
        if not _is_grad_enabled() or _count_function_modes():
            torchstate.save_and_reset()
        if begin:
            quickness.measured(_clock() - begin)
        # what it called may be on its way still, and is not to be overtaken by the answer
        if replies is not None and not run.has_called and run.nested is None and replies.put(self, result):
            return replies
        if run.creation is not None or (self.content is None and self.error is None):
            self.result = result
        return self.finish

    def _postpone(self) -> None:
        """It came to a thread before it was known how large its result is likely to be."""
        if not self.run.ended:
            self.run.host.queue_of(self.run.inbound).submit(self)

    def finish(self) -> None:
        """The loop does what is left to be done."""
        run = self.run
        if run.has_called:
            # the loop may have looked for what threads have done before it looks at what they asked for
            run.has_called = False
            run.host.loop.call_soon(torchstate.run_with, torchstate.DEFAULTS, self.finish)
            return
        if run.is_counted:
            run.leave_window()
        replies = run.host.replies
        result, error, content = self.result, self.error, self.content
        self.result = self.error = self.content = None  # it may be kept for a while, and they may be large
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
