"""Control messages on their way: gathered, sent together, and sent again until they are answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import partial
from typing import Any, Final, TypeAlias

from arpc.agent.agent import Agent
from arpc.agent.peers.peer import PeerState
from arpc.errors import ArpcError, CallError, ShutdownError, UnknownWorkerError
from arpc.ids import WorkerInfo, address_of
from arpc.log import get_logger
from arpc.options import RpcOptions
from arpc.rref.events import WorkerName
from arpc.rref.exactly_once import Numbers
from arpc.wire.messages import Message, RRefForkRequest, RRefUserDelete

__all__ = ["ControlQueue", "Item"]

logger = get_logger("arpc.rref")

Item: TypeAlias = Sequence[Any]
Settled: TypeAlias = Callable[[type[Message], WorkerInfo, Sequence[Item], Any, "Exception | None"], None]

# Nobody waits for a delete: a few milliseconds gather what a loop drops one by one
_DELETE_LINGER_S: Final = 0.005
_ITEMS_PER_MESSAGE: Final = 8192
# How long one attempt may take, in units of the backoff
_ATTEMPT: Final = 10
_BACKOFF_FACTOR: Final = 1.5


class ControlQueue:
    """Sends items of messages to peers. ``settled`` hears what was answered, or why a message was given up."""

    def __init__(self, agent: Agent, options: RpcOptions, context: Context, epoch: int, settled: Settled) -> None:
        self._agent = agent
        self._context = context
        self._loop = agent.loop
        self._backoff_s = options.control_backoff
        self._retries = options.control_retries
        self._epoch = epoch
        self._settled = settled
        self._waiting: dict[tuple[type[Message], WorkerInfo], list[Item]] = {}
        self._flush: asyncio.Handle | None = None
        self._is_lingering = False
        self._numbers: dict[WorkerName, Numbers] = {}
        self._first = 1
        """Where the numbers for a peer begin: beyond all that were used for one that was forgotten and may return."""
        self._in_flight = 0
        self._retrying: set[asyncio.TimerHandle] = set()
        self._is_closed = False
        self.messages_sent = 0
        self.items_sent = 0

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._in_flight)

    def numbers(self, to: WorkerName) -> Numbers:
        """The numbers of messages to a peer. They go on when another worker comes under its name."""
        numbers = self._numbers.get(to)
        if numbers is None:
            numbers = self._numbers[to] = Numbers(self._first)
        return numbers

    def forget(self, to: WorkerName) -> None:
        """Let go of the numbers for a peer that is gone, unless messages to it are still under way."""
        numbers = self._numbers.get(to)
        if numbers is not None and numbers.is_settled:
            self._first = max(self._first, numbers.oldest)
            del self._numbers[to]

    def add(self, message: type[Message], to: WorkerInfo, item: Item) -> None:
        """Send an item with the next message of its kind."""
        waiting = self._waiting.get((message, to))
        if waiting is not None:
            waiting.append(item)  # when these are sent is settled
        elif not self._is_closed:
            self._waiting[message, to] = [item]
            self._settle_when(message)

    def _settle_when(self, message: type[Message]) -> None:
        is_patient = message is RRefUserDelete
        if self._flush is None:
            self._is_lingering = is_patient
            self._schedule(_DELETE_LINGER_S if is_patient else 0.0)
        elif self._is_lingering and not is_patient:
            self.hurry()

    def hurry(self) -> None:
        """Do not wait for more deletes to gather."""
        if self._flush is not None and self._is_lingering:
            self._flush.cancel()
            self._is_lingering = False
            self._schedule(0.0)

    def _schedule(self, delay_s: float) -> None:
        # in the worker's own context: a handler may have caused the message, and its deadline is not the message's
        context = self._context.copy()
        if delay_s:
            self._flush = self._loop.call_later(delay_s, self._send_gathered, context=context)
        else:
            self._flush = self._loop.call_soon(self._send_gathered, context=context)

    def _send_gathered(self) -> None:
        self._flush = None
        waiting, self._waiting = self._waiting, {}
        for (message, to), items in waiting.items():
            for start in range(0, len(items), _ITEMS_PER_MESSAGE):
                self._in_flight += 1
                # the others may be handled twice, and numbers that nobody notes would be gaps
                number = self.numbers(to.name).take() if message is RRefForkRequest else 0
                self._send(message, to, items[start : start + _ITEMS_PER_MESSAGE], number, attempt=0)

    def _send(self, message: type[Message], to: WorkerInfo, items: list[Item], number: int, attempt: int) -> None:
        if self._is_closed:
            return
        self.messages_sent += 1
        self.items_sent += len(items)
        flat = [part for item in items for part in item]
        arguments = (self._epoch, number, self.numbers(to.name).oldest, flat)
        answered = partial(self._answered, message, to, items, number, attempt)
        try:
            future = self._agent.request(message, address_of(to), arguments, _ATTEMPT * self._backoff_s)
        except ArpcError as error:
            self._failed(message, to, items, number, attempt, error)
        else:
            future.add_done_callback(answered)

    def _answered(
        self,
        message: type[Message],
        to: WorkerInfo,
        items: list[Item],
        number: int,
        attempt: int,
        future: asyncio.Future[Any],
    ) -> None:
        error = asyncio.CancelledError() if future.cancelled() else future.exception()
        if error is None:
            self._settle(message, to, items, number, future.result(), None)
        elif isinstance(error, Exception):
            self._failed(message, to, items, number, attempt, error)
        else:
            self._settle(message, to, items, number, None, ShutdownError("the message was cancelled"))

    def _failed(
        self, message: type[Message], to: WorkerInfo, items: list[Item], number: int, attempt: int, error: Exception
    ) -> None:
        if self._is_closed:
            return
        is_hopeless = isinstance(error, ShutdownError | UnknownWorkerError) or not isinstance(error, CallError)
        if is_hopeless or self._has_left(to) or attempt >= self._retries:
            level = (
                logging.DEBUG if isinstance(error, CallError | ShutdownError | UnknownWorkerError) else logging.ERROR
            )
            logger.log(
                level, "%s to worker %s is given up: %s", message.type.name, to.name, error, extra={"peer": to.name}
            )
            self._settle(message, to, items, number, None, error)
            return
        delay_s = self._backoff_s * _BACKOFF_FACTOR**attempt

        def again() -> None:
            self._retrying.discard(timer)
            self._send(message, to, items, number, attempt + 1)

        timer = self._loop.call_later(delay_s, again)
        self._retrying.add(timer)

    def _has_left(self, worker: WorkerInfo) -> bool:
        """Whether a worker said goodbye: that incarnation of it never comes back."""
        peer = self._agent.peer(address_of(worker))
        return peer is not None and peer.info == worker and peer.state is PeerState.GONE

    def _settle(
        self,
        message: type[Message],
        to: WorkerInfo,
        items: list[Item],
        number: int,
        reply: Any,
        error: Exception | None,
    ) -> None:
        self._in_flight -= 1
        self.numbers(to.name).settle(number)
        if not self._is_closed:
            self._settled(message, to, items, reply, error)

    def close(self) -> None:
        self._is_closed = True
        self._waiting.clear()
        self._in_flight = 0
        if self._flush is not None:
            self._flush.cancel()
        for timer in self._retrying:
            timer.cancel()
        self._retrying.clear()
