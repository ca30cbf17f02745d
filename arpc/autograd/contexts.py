"""What one worker knows of a context: the messages that tensors left and came with, and the gradients.

A context has the same id on all workers that it touches.
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
"""The context that this code records in. Handlers have that of their caller."""

# Messages of contexts that are not here may still arrive for a while. They must not bring to life again what has ended
_TOMBSTONES: Final = 4096
"""How many contexts that are not here are remembered: of those that have ended, of those left, and of all others."""
_MAX_OF_PEER: Final = 65_536
"""How many contexts one worker may have here that have not ended."""

NO_GRADIENTS: Final[Mapping[Tensor, Tensor]] = MappingProxyType({})

# What no number of answers makes up for
ENDLESS: Final = 1 << 62
"""How many calls one counts for that has more than one answer."""


class AutogradContext(msgspec.Struct, eq=False):
    """One context on one worker.

    It belongs to the loop. But a thread in which a plain function ends records the answer itself. So sends are added,
    and the clock and the answered handlers counted, with the ``lock`` held. Only the loop removes sends.
    """

    id: int
    lock: Any = msgspec.field(default_factory=Lock)
    since: float = msgspec.field(default_factory=monotonic)
    """When this worker came to know it, for those who look."""
    sends: dict[int, Send] = {}
    """By message id, in the order they were sent."""
    recvs: dict[int, Any] = {}
    """The recv nodes, by message id."""
    known_workers: dict[int, int] = {}
    """Ids of the workers that were told of this context, or told this one.

    The value counts calls to that worker, but for those that it had handled when it left the context.
    """
    active_pass: Any = None
    """The `BackwardPass` under way, if any."""
    clock: int = 0
    """Counts messages with tensors: larger after each than at any message that it depends on (Lamport's clock)."""
    running_thread: Any = None
    """The future of what a pass runs in a thread, which may go on after the pass was ended."""
    last_pass: int = -1
    """The last pass that has ended here, and so may still fail elsewhere."""
    last_announced_to: Collection[int] = ()
    """Who was told in it, or is being told by an answer, what was live here."""
    aborted_passes: frozenset[int] = frozenset()
    last_failed: tuple[int, int | None] = (-1, None)
    """The last of them that failed here, and the worker that is told why by the answer to the parcel that began it."""
    aborts_told: frozenset[int] = frozenset()
    """Those of them that this worker has told others of."""
    told_early: dict[int, dict[int, bool]] = {}
    """By pass: who was told that nothing is live here before it was known, and whether they said what is there."""
    sends_used: int = 0
    """How often gradients have come for a message, in all passes."""
    calls_made: int = 0
    """Calls of this worker in the context, and much more for one that has no single answer."""
    calls_answered: int = 0
    """Those of them whose answer was recorded. If it is all of them, none of their handlers is under way."""
    handlers_begun: int = 0
    """Calls of others in the context."""
    handlers_answered: int = 0
    """Those of them that were answered. A stream is never answered: what follows an item may come at any time."""
    gradients: Mapping[Tensor, Tensor] = NO_GRADIENTS
    """What passes that have ended here have accumulated. Replaced, never changed."""
    before_last_pass: Mapping[Tensor, Tensor] = NO_GRADIENTS
    """Those without the last pass, to which a pass that fails late goes back."""

    @property
    def creator(self) -> int:
        """The id of the worker that made it."""
        return self.id >> LOCAL_BITS

    def record_send(self, new_id: Callable[[], int], node: Any, to: int, answered: int = 0) -> tuple[int, int]:
        """Note that a message leaves with tensors of a send node; returns its id and stamp. In any thread.

        ``answered`` counts the handler whose answer it is.
        """
        with self.lock:  # ids grow in the order of the sends
            message_id = new_id()
            self.clock = stamp = self.clock + 1
            self.sends[message_id] = Send(node.next_functions[1:], node, to, stamp)
            self.handlers_answered += answered
        return message_id, stamp

    def receive_stamp(self, stamp: int) -> None:
        """A message has come, and what is sent from now on may depend on its tensors."""
        with self.lock:
            self.clock = max(self.clock, stamp) + 1

    def worker_left(self, worker: int, calls_handled: int) -> None:
        """A worker has left with an answer, after so many calls of this one since it had entered the context.

        Unless a call is on its way that brings it back, it need not hear of the end.
        """
        others = self.known_workers.get(worker, 0) - calls_handled
        if others > 0:
            self.known_workers[worker] = others
        else:
            self.known_workers.pop(worker, None)

    def commit(self, pass_id: int, gradients: Mapping[Tensor, Tensor], announced_to: Collection[int] = ()) -> None:
        """Add what a pass computed here. It can be taken back until the next pass ends."""
        self.before_last_pass = self.gradients
        self.last_pass = pass_id
        self.last_announced_to = announced_to
        if not self.gradients:
            self.gradients = gradients
            return
        total = dict(self.gradients)
        for leaf, gradient in gradients.items():
            before = total.get(leaf)
            # not in place: what people hold of the gradients so far stays what it was, and can be gone back to
            total[leaf] = gradient if before is None else summed(before, gradient)
        self.gradients = total

    def has_sends_to(self, worker: int) -> bool:
        return any(send.to == worker for send in self.sends.copy().values())

    def drop_sends_to(self, worker: int) -> None:
        """A worker is lost. What was sent to it keeps no graph any more, and no pass waits for its gradients."""
        for message_id, send in self.sends.copy().items():
            if send.to == worker:
                del self.sends[message_id]

    def clear(self) -> None:
        """It has ended: whoever still has it shall not keep the graph, or the gradients, alive."""
        self.sends.clear()
        self.recvs.clear()
        self.gradients = self.before_last_pass = NO_GRADIENTS

    def roll_back(self, pass_id: int, parent: int | None = None) -> None:
        """A pass has failed: no gradient of it stays. ``parent``: who is told why, if it is the part of it here."""
        self.aborted_passes |= {pass_id}
        if parent is not None:
            self.last_failed = pass_id, parent
        if pass_id == self.last_pass:
            self.gradients = self.before_last_pass
            self.last_pass = -1


class Absent(msgspec.Struct, eq=False):
    """What is remembered of a context that is not here, and has not ended: messages of it may still arrive."""

    last_pass: int = -1
    """The pass after which this worker was left with nothing of it; -1 if it left with the answer to a call."""
    told: int = -1
    """The worker that hears, or has heard, that this one has left."""
    clock: int = 0
    failed: frozenset[int] = frozenset()
    """Passes that have failed, of which news came: what is to begin them may still come."""
    told_early: dict[int, dict[int, bool]] = {}
    """See `AutogradContext.told_early`. There is one pass at a time."""


class Container:
    """The contexts of one worker."""

    new_message_id: Callable[[], int]
    """Makes an id for a message, which no other worker uses, and never 0."""
    new_pass_id: Callable[[], int]
    """Makes an id for a backward pass that starts here."""
    _new_id: Callable[[], int]

    def __init__(self, worker_id: int = -1) -> None:
        self.contexts: dict[int, AutogradContext] = {}
        self.callable: dict[int, None] = {}
        """Contexts that calls may be made in: those, and those that were left with an answer. See `rejoin`."""
        self.rejoined: Callable[[AutogradContext], None] = _ignore
        """Told of a context that this worker had left, and makes a call in again."""
        self.leaves_unused = True
        """Whether a context that nothing was recorded in is left with the answer to a call."""
        # Contexts of other workers. Each table has room of its own, and forgets what was learned first
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._left: OrderedDict[int, Absent] = OrderedDict()
        """Those that this worker was left with nothing of."""
        self._unknown: OrderedDict[int, Absent] = OrderedDict()
        """Those that were heard of before any call in them came."""
        self.identify(worker_id)

    def identify(self, worker_id: int) -> None:
        """Begin with the ids of this worker."""
        self.worker_id = worker_id
        first = worker_id << LOCAL_BITS
        self._new_id = count(first).__next__
        self.new_message_id = count(first + 1).__next__
        self.new_pass_id = count(first).__next__

    def new(self) -> AutogradContext:
        """A context of this worker's own."""
        context_id = self._new_id()
        context = self.contexts[context_id] = AutogradContext(context_id)
        self.callable[context_id] = None
        return context

    def enter(self, context_id: int, caller: int) -> AutogradContext | None:
        """The context that a message of a worker belongs to; made if it is new here, None if it has ended.

        Raises `OverloadedError` if there are too many of that worker.
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
            context.aborted_passes, context.told_early = absent.failed, absent.told_early
            context.clock, context.last_pass = absent.clock, absent.last_pass
            if absent.last_pass != -1:
                context.last_announced_to = (absent.told,)
        return context

    def _check_number(self, caller: int) -> None:
        known = sum(caller in context.known_workers for context in self.contexts.values())
        if known >= _MAX_OF_PEER:
            raise OverloadedError(f"{known} autograd contexts of its calls have not ended yet")

    def try_to_leave(self, context: AutogradContext, pass_id: int, told: int) -> bool:
        """Forget a context, which may be entered again, if this worker has no use for it after a pass.

        ``told`` is who hears of that by the answer that is on its way: the one that engaged this worker. It had no call
        under way when it did, but one that it has made since may have come before.
        """
        me = self.worker_id
        if (
            # first: a thread that ends a handler adds to the sends before it counts the answer
            context.handlers_begun != context.handlers_answered
            or context.sends
            or context.gradients
            or context.calls_made != context.calls_answered
            or context.aborted_passes
            or not context.known_workers.keys() <= {me, told}
            or context.id >> LOCAL_BITS == me
        ):
            return False
        self._leave(context, pass_id, told)
        self.callable.pop(context.id, None)
        return True

    def try_to_leave_unused(self, context: AutogradContext, told: int) -> bool:
        """Forget a context if nothing was ever recorded in it here, and nobody but ``told`` knows that it is known.

        ``told``, whose calls these were, hears of that by the answer that is on its way.
        """
        if (
            not self.leaves_unused
            or context.handlers_begun != context.handlers_answered  # before the sends, as above
            or context.sends
            or context.recvs
            or context.calls_made
            or len(context.known_workers) > 1
            or context.last_pass != -1
            or context.active_pass is not None
            or context.aborted_passes
            or context.told_early
            or told not in context.known_workers
            or context.id >> LOCAL_BITS == self.worker_id
        ):
            return False
        self._leave(context, -1, told)
        return True

    def _leave(self, context: AutogradContext, after: int, told: int) -> None:
        del self.contexts[context.id]
        self._left[context.id] = Absent(after, told, context.clock)
        if len(self._left) > _TOMBSTONES:
            oldest, _ = self._left.popitem(last=False)
            self.callable.pop(oldest, None)

    def _note_of(self, context_id: int) -> Absent | None:
        """Where to note news of a context that is not here; None if it has ended, and nothing will come of it."""
        if context_id in self._ended or context_id >> LOCAL_BITS == self.worker_id:
            return None
        note = self._left.get(context_id) or self._unknown.get(context_id)
        if note is None:
            note = self._unknown[context_id] = Absent()
            if len(self._unknown) > _TOMBSTONES:
                self._unknown.popitem(last=False)
        return note

    def rejoin(self, context_id: int) -> AutogradContext | None:
        """The context of a task that outlives its handler, if this worker has left it with the answer of that."""
        left = self._left.get(context_id)
        if left is None or left.last_pass != -1:
            return None
        context = self.enter(context_id, context_id >> LOCAL_BITS)
        if context is not None:
            self.rejoined(context)
        return context

    def has_left(self, context_id: int) -> bool:
        """Whether this worker was left with nothing of a context."""
        return context_id in self._left

    def has_told_that_it_left(self, context_id: int, pass_id: int, told: int) -> bool:
        """Whether it was in that pass, and that worker hears of it, or has."""
        left = self._left.get(context_id)
        return left is not None and (left.last_pass, left.told) == (pass_id, told)

    def fail_early(self, context_id: int, pass_id: int) -> None:
        """A pass has failed, of a context that is not known here: what is to begin it may still come."""
        if (note := self._note_of(context_id)) is not None:
            note.failed |= {pass_id}

    def tell_early(self, context_id: int, pass_id: int, told: int, *, has_announced: bool) -> None:
        """A worker is told that nothing is live here, of an unknown context: a call may have been overtaken."""
        if (note := self._note_of(context_id)) is not None:
            by_worker = note.told_early.get(pass_id, {})
            by_worker[told] = has_announced or by_worker.get(told, False)
            note.told_early = {pass_id: by_worker}

    def find(self, context_id: int) -> AutogradContext:
        """A context by its id. Raises `AutogradError` if it is not known here."""
        context = self.contexts.get(context_id)
        if context is None:
            raise AutogradError(
                f"Could not find autograd context with id: {context_id}. It has ended, or no call that was made in it "
                f"has reached this worker"
            )
        return context

    def remove(self, context_id: int) -> AutogradContext | None:
        """End a context here, once and for all; None if it is not known."""
        self.callable.pop(context_id, None)
        if context_id >> LOCAL_BITS != self.worker_id:  # of its own no message brings one to life
            self._ended[context_id] = None
            if len(self._ended) > _TOMBSTONES:
                self._ended.popitem(last=False)
            self._left.pop(context_id, None)
            self._unknown.pop(context_id, None)
        return self.contexts.pop(context_id, None)


def _ignore(_: AutogradContext) -> None:
    """Nobody has asked to hear of it."""
