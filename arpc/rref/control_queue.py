"""Dropped handles and control messages: batched, sent, and retried until they are acknowledged."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from arpc.agent.peers.peer import PeerState
from arpc.errors import CallError, ShutdownError, UnknownWorkerError
from arpc.ids import WorkerInfo, address_of
from arpc.log import get_logger
from arpc.rref.exactly_once import Numbers
from arpc.rref.instructions import Instruction, Send
from arpc.rref.user_ref import Use
from arpc.rref.values import Value
from arpc.wire.messages import Message, RRefForkRequest, RRefUserDelete

if TYPE_CHECKING:
    from arpc.rref.context import RRefContext

__all__ = ["ControlQueue", "Item"]

logger = get_logger("arpc.rref")

Item: TypeAlias = Sequence[Any]

# Drops are not urgent: those of a few milliseconds are gathered, and wake the loop once for all of them
_LINGER_S: Final = 0.01
_DROPS_PER_TURN: Final = 2500
"""The number of drops handled before other callbacks of the loop get a turn."""
_ITEMS_PER_MESSAGE: Final = 8192
# The timeout of one attempt, in units of the backoff
_ATTEMPT: Final = 10
_BACKOFF_FACTOR: Final = 1.5


class ControlQueue:
    """Sends items to peers, many in a message. `RRefContext.settled` gets each reply, or the error of the last attempt.

    Handles are dropped on any thread, between any two instructions, one by one or by the thousand. They wait here for
    a few milliseconds, and so do the delete messages that follow from them: neither is urgent.
    """

    def __init__(self, context: RRefContext) -> None:
        self._context = context
        self._agent = context.agent
        self._loop = context.agent.loop
        self._backoff_s = context.options.control_backoff
        self._retries = context.options.control_retries
        self._waiting: dict[tuple[type[Message], WorkerInfo], list[Item]] = {}
        self._dropped: deque[Use | Value] = deque()
        """The uses and values whose handles are gone."""
        self._is_woken = False
        """Whether the loop will look for dropped handles soon, so that it need not be woken for more."""
        self._timer: asyncio.Handle | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.messages_sent = 0
        self.items_sent = 0

    @property
    def is_idle(self) -> bool:
        """Whether no message is queued or in flight, and no dropped handle is still to be handled."""
        return not (self._dropped or self._waiting or self._sending)

    def drop(self, held: Use | Value) -> None:
        """Queue the use or value of a dropped handle. Called by the garbage collector: on any thread, at any time."""
        if self._is_closed:
            return
        self._dropped.append(held)
        # A race costs a spare wake-up, never a lost one: the flag is cleared before the queue is emptied
        if not self._is_woken:
            self._is_woken = True
            with suppress(RuntimeError):  # the loop is closed, and the worker gone with it
                self._loop.call_soon_threadsafe(self._linger)

    def _linger(self) -> None:
        if self._timer is None and not self._is_closed:
            self._timer = self._loop.call_later(_LINGER_S, self._look, context=self._context.fresh_context())

    def _look(self) -> None:
        self._is_woken = False
        try:
            self.handle_drops(_DROPS_PER_TURN)  # while the timer is set, so that the deletes queued here start no other
        finally:
            self._timer = None
        if self._dropped:
            self._timer = self._loop.call_soon(self._look)
        else:
            self.send_gathered()

    def handle_drops(self, at_most: int | None = None) -> None:
        """Pass dropped handles to the state machine: all of them, or at most ``at_most``."""
        dropped, forks = self._dropped, self._context.forks
        following: list[Instruction] = []
        for _ in range(len(dropped) if at_most is None else min(at_most, len(dropped))):
            held = dropped.popleft()
            if isinstance(held, Use):
                following += forks.handle_dropped(held)
            else:
                forks.owner_handle_dropped(held.rref)
        self._context.carry_out(following)

    def add(self, send: Send) -> None:
        """Send an item with the next message of its kind."""
        key = send.message, send.to
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.append(send.item)  # it leaves with these, which are already scheduled
        elif not self._is_closed:
            self._waiting[key] = [send.item]
            if send.message is RRefUserDelete:
                self._linger()
            else:
                self._loop.call_soon(self.send_gathered)

    def send_gathered(self) -> None:
        """Send the gathered items now."""
        waiting, self._waiting = self._waiting, {}
        for (message, to), items in waiting.items():
            for start in range(0, len(items), _ITEMS_PER_MESSAGE):
                sending = self._send(message, to, items[start : start + _ITEMS_PER_MESSAGE])
                task = self._loop.create_task(sending, context=self._context.fresh_context())
                self._sending.add(task)
                task.add_done_callback(self._sending.discard)

    async def _send(self, message: type[Message], to: WorkerInfo, items: list[Item]) -> None:
        numbers, flat = self._context.numbers[to.name], list(chain.from_iterable(items))
        # other messages may be handled twice, and their numbers, which no receiver records, would leave gaps
        number = numbers.take()[0] if message is RRefForkRequest else 0
        reply: Any = None
        error: Exception | None = None
        try:
            reply = await self._send_until_answered(message, to, number, numbers, flat, len(items))
        except asyncio.CancelledError:
            if self._is_closed:
                raise
            error = ShutdownError("the message was cancelled")  # by user code that cancels all tasks
        except Exception as reason:  # noqa: BLE001 - whatever it is, the message is given up
            error = reason
            level = (
                logging.DEBUG if isinstance(error, CallError | ShutdownError | UnknownWorkerError) else logging.ERROR
            )
            logger.log(
                level, "%s to worker %s is given up: %s", message.type.name, to.name, error, extra={"peer": to.name}
            )
        numbers.settle(number)
        if not self._is_closed:
            self._context.settled(message, to, items, reply, error)
        del error  # its traceback refers to this frame

    async def _send_until_answered(
        self, message: type[Message], to: WorkerInfo, number: int, numbers: Numbers, flat: list[Any], count: int
    ) -> Any:
        for attempt in range(self._retries + 1):
            self.messages_sent += 1
            self.items_sent += count
            arguments = (number, numbers.oldest, flat)
            try:
                return await self._agent.request(message, address_of(to), arguments, _ATTEMPT * self._backoff_s)
            except CallError:
                if attempt == self._retries or self._has_left(to):
                    raise
            await asyncio.sleep(self._backoff_s * _BACKOFF_FACTOR**attempt)
        return None

    def _has_left(self, worker: WorkerInfo) -> bool:
        """Whether a worker has said goodbye: that incarnation of it never comes back."""
        peer = self._agent.peer(address_of(worker))
        return peer is not None and peer.info == worker and peer.state is PeerState.GONE

    def close(self) -> None:
        self._is_closed = True
        self._dropped.clear()
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
        for task in self._sending:
            task.cancel()
