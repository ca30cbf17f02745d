"""The autograd contexts of one worker: the messages that brought or took tensors, and the gradients.

A context has the same id on all workers that it reaches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from itertools import count
from threading import Lock
from time import monotonic
from types import MappingProxyType
from typing import Any, Final

import msgspec
from torch import Tensor

from arpc.autograd.engine.gradient_sums import summed
from arpc.autograd.passes.plan import Send
from arpc.errors import AutogradError, OverloadedError
from arpc.ids import LOCAL_BITS

__all__ = ["ENDLESS", "NO_GRADIENTS", "AutogradContext", "Container", "Send", "current_context_id"]

current_context_id: ContextVar[int | None] = ContextVar("arpc.autograd", default=None)
"""The id of the context that this code records in. Handlers have that of their caller."""

# Messages of contexts that are not here may still arrive for a while. They must not bring ended contexts back
_TOMBSTONES: Final = 4096
"""The number of contexts not here that are remembered: of those that have ended, of those left, and of all others."""
_MAX_OF_PEER: Final = 65_536
"""The number of contexts that one worker may have here that have not ended."""

NO_GRADIENTS: Final[Mapping[Tensor, Tensor]] = MappingProxyType({})

ENDLESS: Final = 1 << 62
"""The number of calls that a stream counts as: however many replies it gets, `calls_answered` never catches up."""


class AutogradContext(msgspec.Struct, eq=False):
    """One context on one worker.

    Only the loop uses it, except that a thread in which a plain function ends records the reply itself. So code holds
    the ``lock`` to add sends, and to change the clock and the count of answered handlers. Only the loop removes sends.
    """

    id: int
    lock: Any = msgspec.field(default_factory=Lock)
    since: float = msgspec.field(default_factory=monotonic)
    """The time when this worker first saw the context, for reports."""
    sends: dict[int, Send] = {}
    """The messages that left with tensors, by message id, in the order they were sent."""
    recvs: dict[int, Any] = {}
    """The recv nodes, by message id."""
    known_workers: dict[int, int] = {}
    """The ids of workers that this worker has shared the context with, or got it from.

    The value counts calls to that worker, except those that it had handled when it left the context.
    """
    active_pass: Any = None
    """The `BackwardPass` under way, if any."""
    clock: int = 0
    """A Lamport clock of messages with tensors: larger after each message than at any message that it depends on."""
    running_thread: Any = None
    """The future of a pass's job in a thread, which may go on after the pass was ended."""
    last_pass: int = -1
    """The last pass that has ended here, and so may still fail on other workers; -1 if there is none."""
    last_announced_to: Collection[int] = ()
    """The workers that a first parcel of that pass was sent to, perhaps by a reply still in flight."""
    aborted_passes: frozenset[int] = frozenset()
    last_failed: tuple[int, int | None] = (-1, None)
    """The last pass with a parent that failed here, and the parent, which gets the reason with the reply."""
    aborts_sent: frozenset[int] = frozenset()
    """The passes whose aborts this worker has sent to others."""
    early_replies: dict[int, dict[int, bool]] = {}
    """By pass: workers that got `NOTHING_LIVE` before the context was known, and whether they sent a first parcel."""
    sends_used: int = 0
    """The number of times that gradients have arrived for a message, in all passes."""
    calls_made: int = 0
    """The number of calls of this worker in the context; a stream counts as `ENDLESS`."""
    calls_answered: int = 0
    """The number of recorded replies to these calls. If it is `calls_made`, none of their handlers is running."""
    handlers_begun: int = 0
    """The number of calls of other workers in the context."""
    handlers_answered: int = 0
    """The number of these calls that were answered. A stream never is: the next item may follow at any time."""
    gradients: Mapping[Tensor, Tensor] = NO_GRADIENTS
    """The gradients that passes that have ended here have accumulated. Replaced, never changed."""
    before_last_pass: Mapping[Tensor, Tensor] = NO_GRADIENTS
    """The gradients without those of the last pass, restored if it fails late."""

    @property
    def creator(self) -> int:
        """The id of the worker that created the context."""
        return self.id >> LOCAL_BITS

    def record_send(self, new_id: Callable[[], int], node: Any, to: int, answered: int = 0) -> tuple[int, int]:
        """Record a message that leaves with tensors of a send node; return its id and stamp. Callable in any thread.

        ``answered`` is 1 if the message is the reply of a handler, else 0.
        """
        with self.lock:  # ids grow in the order of the sends
            message_id = new_id()
            self.clock = stamp = self.clock + 1
            self.sends[message_id] = Send(node.next_functions[1:], node, to, stamp)
            self.handlers_answered += answered
        return message_id, stamp

    def receive_stamp(self, stamp: int) -> None:
        """Advance the clock beyond a received message: messages sent from now on may depend on its tensors."""
        with self.lock:
            self.clock = max(self.clock, stamp) + 1

    def worker_left(self, worker: int, calls_handled: int) -> None:
        """Record that a worker has left with a reply, after it handled so many calls since it entered the context.

        It need not be notified of the end, unless a call is in flight that brings it back.
        """
        others = self.known_workers.get(worker, 0) - calls_handled
        if others > 0:
            self.known_workers[worker] = others
        else:
            self.known_workers.pop(worker, None)

    def commit(self, pass_id: int, gradients: Mapping[Tensor, Tensor], announced_to: Collection[int] = ()) -> None:
        """Add the gradients that a pass computed here. They can be rolled back until the next pass ends."""
        self.before_last_pass = self.gradients
        self.last_pass = pass_id
        self.last_announced_to = announced_to
        if not self.gradients:
            self.gradients = gradients
            return
        total = dict(self.gradients)
        for leaf, gradient in gradients.items():
            before = total.get(leaf)
            # not in place: users may hold the gradients so far, and a rollback restores them
            total[leaf] = gradient if before is None else summed(before, gradient)
        self.gradients = total

    def has_sends_to(self, worker: int) -> bool:
        return any(send.to == worker for send in self.sends.copy().values())

    def drop_sends_to(self, worker: int) -> None:
        """Drop the sends to a lost worker: they keep no graph alive, and no pass waits for their gradients any more."""
        for message_id, send in self.sends.copy().items():
            if send.to == worker:
                del self.sends[message_id]

    def clear(self) -> None:
        """Drop the graph and the gradients of an ended context, whatever code may still refer to it."""
        self.sends.clear()
        self.recvs.clear()
        self.gradients = self.before_last_pass = NO_GRADIENTS

    def roll_back(self, pass_id: int, parent: int | None = None) -> None:
        """Roll back a failed pass: no gradient of it stays. ``parent`` is the parent of a pass that failed here."""
        self.aborted_passes |= {pass_id}
        if parent is not None:
            self.last_failed = pass_id, parent
        if pass_id == self.last_pass:
            self.gradients = self.before_last_pass
            self.last_pass = -1


class AbsentContext(msgspec.Struct, eq=False):
    """The data of a context that is not here, and has not ended: messages of it may still arrive."""

    last_pass: int = -1
    """The pass with which this worker left the context; -1 if it left with the reply to a call, or was never in it."""
    notified: int = -1
    """The worker that is notified, by a reply, that this one has left; -1 if it was never in the context."""
    clock: int = 0
    failed: frozenset[int] = frozenset()
    """The failed passes whose aborts have arrived: the parcels that begin these passes may still arrive."""
    early_replies: dict[int, dict[int, bool]] = {}
    """See `AutogradContext.early_replies`. It has one pass at a time."""


class Container:
    """The contexts of one worker."""

    new_message_id: Callable[[], int]
    """Returns an id for a message, which no other worker uses, and never 0."""
    new_pass_id: Callable[[], int]
    """Returns an id for a backward pass that starts here."""
    _new_id: Callable[[], int]

    def __init__(self, worker_id: int = -1) -> None:
        self.contexts: dict[int, AutogradContext] = {}
        self.callable: dict[int, None] = {}
        """The contexts that calls may be made in: `contexts`, and those left with the reply to a call. See `rejoin`."""
        self.rejoined: Callable[[AutogradContext], None] = _ignore
        """Called with a context that this worker had left, and makes a call in again."""
        self.leaves_unused = True
        """Whether a context that nothing was recorded in is left with the reply to a call."""
        # Contexts of other workers. Each table has its own limit, and drops its oldest entries first
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._left: OrderedDict[int, AbsentContext] = OrderedDict()
        """The contexts that this worker has left, because nothing of them remained here."""
        self._unknown: OrderedDict[int, AbsentContext] = OrderedDict()
        """The contexts of which other messages arrived before any call."""
        self.identify(worker_id)

    def identify(self, worker_id: int) -> None:
        """Set the id of this worker, from which all ids that it makes are derived."""
        self.worker_id = worker_id
        first = worker_id << LOCAL_BITS
        self._new_id = count(first).__next__
        self.new_message_id = count(first + 1).__next__
        self.new_pass_id = count(first).__next__

    def new(self) -> AutogradContext:
        """Create a context of this worker's own."""
        context_id = self._new_id()
        context = self.contexts[context_id] = AutogradContext(context_id)
        self.callable[context_id] = None
        return context

    def enter(self, context_id: int, caller: int) -> AutogradContext | None:
        """Return the context that a message of a worker belongs to; made if it is new here, None if it has ended.

        Raises `OverloadedError` if that worker has too many contexts here.
        """
        context = self.contexts.get(context_id)
        if context is not None or context_id >> LOCAL_BITS == self.worker_id:
            return context
        if context_id in self._ended:
            return None
        if len(self.contexts) >= _MAX_OF_PEER:
            self._check_number(caller)
        context = self.contexts[context_id] = AutogradContext(context_id)
        self.callable[context_id] = None
        absent = self._left.pop(context_id, None) or self._unknown.pop(context_id, None)
        if absent is not None:
            context.aborted_passes, context.early_replies = absent.failed, absent.early_replies
            context.clock, context.last_pass = absent.clock, absent.last_pass
            if absent.last_pass != -1:
                context.last_announced_to = (absent.notified,)
        return context

    def _check_number(self, caller: int) -> None:
        known = sum(caller in context.known_workers for context in self.contexts.values())
        if known >= _MAX_OF_PEER:
            raise OverloadedError(f"{known} autograd contexts of its calls have not ended yet")

    def try_to_leave(self, context: AutogradContext, pass_id: int, notified: int) -> bool:
        """Forget a context after a pass if this worker has no use for it, and return whether it did.

        The context may be entered again. ``notified`` is the worker that the reply notifies: the one that engaged this
        worker. It had no call in flight when it did, but a call that it has made since may have arrived before.
        """
        me = self.worker_id
        if (
            # checked first: a thread that ends a handler adds the send before it counts the reply
            context.handlers_begun != context.handlers_answered
            or context.sends
            or context.gradients
            or context.calls_made != context.calls_answered
            or context.aborted_passes
            or not context.known_workers.keys() <= {me, notified}
            or context.id >> LOCAL_BITS == me
        ):
            return False
        self._leave(context, pass_id, notified)
        self.callable.pop(context.id, None)
        return True

    def try_to_leave_unused(self, context: AutogradContext, notified: int) -> bool:
        """Forget a context if nothing was ever recorded in it here, and it is shared with no worker but one.

        Returns whether it did. ``notified`` is that worker, whose calls these were; the reply notifies it.
        """
        if (
            not self.leaves_unused
            or context.handlers_begun != context.handlers_answered  # checked before the sends, as above
            or context.sends
            or context.recvs
            or context.calls_made
            or len(context.known_workers) > 1
            or context.last_pass != -1
            or context.active_pass is not None
            or context.aborted_passes
            or context.early_replies
            or notified not in context.known_workers
            or context.id >> LOCAL_BITS == self.worker_id
        ):
            return False
        self._leave(context, -1, notified)
        return True

    def _leave(self, context: AutogradContext, after: int, notified: int) -> None:
        del self.contexts[context.id]
        self._left[context.id] = AbsentContext(after, notified, context.clock)
        if len(self._left) > _TOMBSTONES:
            oldest, _ = self._left.popitem(last=False)
            self.callable.pop(oldest, None)

    def _absent(self, context_id: int) -> AbsentContext | None:
        """Return the record of a context that is not here, made if need be; None if the context has ended."""
        if context_id in self._ended or context_id >> LOCAL_BITS == self.worker_id:
            return None
        absent = self._left.get(context_id) or self._unknown.get(context_id)
        if absent is None:
            absent = self._unknown[context_id] = AbsentContext()
            if len(self._unknown) > _TOMBSTONES:
                self._unknown.popitem(last=False)
        return absent

    def rejoin(self, context_id: int) -> AutogradContext | None:
        """Enter a context again for a task that outlives its handler, if this worker left it with the handler's reply.

        Returns the context; None if this worker has not left it so.
        """
        left = self._left.get(context_id)
        if left is None or left.last_pass != -1:
            return None
        context = self.enter(context_id, context_id >> LOCAL_BITS)
        if context is not None:
            self.rejoined(context)
        return context

    def has_left(self, context_id: int) -> bool:
        """Whether this worker has left a context, because nothing of it remained here."""
        return context_id in self._left

    def has_left_with(self, context_id: int, pass_id: int, notified: int) -> bool:
        """Whether this worker has left a context with that pass, by a reply to worker ``notified``."""
        left = self._left.get(context_id)
        return left is not None and (left.last_pass, left.notified) == (pass_id, notified)

    def fail_early(self, context_id: int, pass_id: int) -> None:
        """Record a failed pass of a context that is not known here: the parcel that begins it may still arrive."""
        if (absent := self._absent(context_id)) is not None:
            absent.failed |= {pass_id}

    def record_early_reply(self, context_id: int, pass_id: int, notified: int, *, has_announced: bool) -> None:
        """Record that a worker gets `NOTHING_LIVE` for a context not known here: a call may have been overtaken.

        ``has_announced``: the worker has sent a first parcel.
        """
        if (absent := self._absent(context_id)) is not None:
            by_worker = absent.early_replies.get(pass_id, {})
            by_worker[notified] = has_announced or by_worker.get(notified, False)
            absent.early_replies = {pass_id: by_worker}

    def find(self, context_id: int) -> AutogradContext:
        """Return a context by its id. Raises `AutogradError` if it is not known here."""
        context = self.contexts.get(context_id)
        if context is None:
            raise AutogradError(
                f"Could not find autograd context with id: {context_id}. It has ended, or no call that was made in it "
                f"has reached this worker"
            )
        return context

    def remove(self, context_id: int) -> AutogradContext | None:
        """End a context here, once and for all, and return it; None if it is not known."""
        self.callable.pop(context_id, None)
        if context_id >> LOCAL_BITS != self.worker_id:  # no message brings back a context that this worker created
            self._ended[context_id] = None
            if len(self._ended) > _TOMBSTONES:
                self._ended.popitem(last=False)
            self._left.pop(context_id, None)
            self._unknown.pop(context_id, None)
        return self.contexts.pop(context_id, None)


def _ignore(_: AutogradContext) -> None:
    """The default callback: does nothing."""
