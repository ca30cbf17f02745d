"""Busy-polling for the next message where it is likely to come soon.

An idle CPU goes to sleep, and takes much longer to wake up than a worker takes to reply: across two CPUs, that is most
of a round trip. So a worker that has just read something polls for a short while, in each turn of its loop, before it
lets the loop wait. Both sides of a conversation do so, and neither sleeps in the middle of it.

Polling must never cost other threads and programs what it gains here:

- Each poll yields the CPU first. If another program takes it, polling stops. Where both sides share one CPU, neither
  polls: there, the other side can run only while this one waits.
- Only a conversation, in which one message follows another, is a reason to poll. A single message is not.
- Polls that find nothing use up a credit that successful ones refill. Without credit a poll is tried now and then, and
  less and less often.
- While other threads of this process are busy, the worker does not poll: they need the CPU, or the interpreter lock.
  While its own threads have a quick job, a poll yields to them, since the next message comes after their reply.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextvars import Context
from functools import partial
from time import perf_counter, process_time, thread_time
from typing import TYPE_CHECKING, Final, Protocol

from arpc.transport.timerfd import Alarm, CallAt

if TYPE_CHECKING:
    from arpc.transport.sockets import StreamConnection

__all__ = ["BusyPoll", "Pool", "can_run_at_once", "yield_cpu"]

_CHECK_S: Final = 0.05
"""The interval between checks which connections to poll, while there is traffic."""
_SELDOM_S: Final = 0.5
_SILENT: Final = 100
"""After this many checks in a row without a message in between, they are made only every `_SELDOM_S`."""
_TALK_S: Final = 0.002
"""A message that comes within this time of another is part of a conversation."""
_FIRST_CREDIT: Final = 3
_CREDIT: Final = 50
"""The most credit: how many polls may find nothing after a time in which all found something."""
_SHARED_S: Final = 0.00002
"""To yield takes longer than this if there is another program that wants this CPU."""
_PRICE_OF_SHARING: Final = 10
"""The credit that a poll costs in which the CPU was away for longer than the poll would have lasted."""
_LONGEST_PAUSE: Final = 16
"""The longest pause between two attempts when the credit is used up, in units of `_CHECK_S`."""
_BUSY_SHARE: Final = 0.1
"""Other threads of this process are busy if they have used a CPU for more than this share of the time."""


class Pool(Protocol):
    """A pool of the worker's own threads."""

    @property
    def is_asleep(self) -> bool:
        """Whether no thread has anything to do."""

    @property
    def is_in_slow_job(self) -> bool:
        """Whether a thread is in a job that may take a while."""

    @property
    def cpu_s(self) -> float:
        """The CPU time that the threads have used."""


class BusyPoll:
    """The busy-polling of one worker, over all its connections. A poll ends ``longest_s`` after the last message."""

    def __init__(
        self,
        longest_s: float,
        clock: Callable[[], float] = perf_counter,
        give_way: Callable[[], None] | None = None,
    ) -> None:
        self.longest_s = longest_s
        self._give_way = give_way or yield_cpu
        self.pools: tuple[Pool, ...] = ()
        """The worker's own threads. Their CPU time does not count as that of other threads."""
        self.call_at: CallAt | None = None
        """Schedules the timer, which is always pending; None: the loop's own `call_at`."""
        self.polls = 0
        self.empty_polls = 0
        self._clock = clock
        self._connections: dict[StreamConnection, None] = {}
        self._context = Context()
        self._timer: Alarm | None = None
        self._is_polling = False
        self._is_scheduled = False
        self._has_news = False
        self._until = 0.0
        self._last = -_TALK_S
        self._credit = _FIRST_CREDIT
        self._pause = 1
        self._is_crowded = False
        self._is_any_polled = False
        self._silent = 0
        self._bytes = 0
        self._others_s = 0.0
        self._checked_at = 0.0

    # -- connections

    def join(self, connection: StreamConnection) -> None:
        """Poll for a connection, where that is worth it, until `leave`."""
        self._connections[connection] = None
        self._silent = 0
        self._is_any_polled |= self._decide(connection, _own_cpus())
        if self._timer is None:
            self._checked_at, self._others_s = self._clock(), self._other_threads_s()
            self._check_in(_CHECK_S, connection.loop)

    def leave(self, connection: StreamConnection) -> None:
        self._connections.pop(connection, None)
        if not self._connections:
            self._end()

    def close(self) -> None:
        """Stop polling, for all connections."""
        for connection in self._connections:
            connection.set_busy_poll(None)
        self._connections.clear()
        self._end()

    def _end(self) -> None:
        self._is_polling = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- polling

    def received(self, loop: asyncio.AbstractEventLoop) -> None:
        """Record that bytes have come on a polled connection; in a conversation, this starts a poll."""
        self._has_news = True
        if self._is_polling:
            return
        now = self._clock()
        is_talk = now - self._last < _TALK_S
        self._last = now
        if is_talk and self._credit > 0:
            self._is_polling = True
            self._has_news = False
            self._until = now + self.longest_s
            self.polls += 1
            self._schedule(loop)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._poll, loop, context=self._context)

    def _poll(self, loop: asyncio.AbstractEventLoop) -> None:
        """Poll between two turns of the loop, which does not wait as long as this is scheduled again."""
        self._is_scheduled = False
        if not self._is_polling:
            return
        if self._has_news:
            self._has_news = False
            self._last = now = self._clock()
            self._until = now + self.longest_s
            self._pause = 1
            if self._credit < _CREDIT:
                self._credit += 1
            if now - self._checked_at > _CHECK_S:
                self._check_all(now)
                if not self._is_polling:
                    return
        else:
            begun = self._clock()
            is_asleep = True
            for pool in self.pools:
                if not pool.is_asleep:
                    is_asleep = False
                    if pool.is_in_slow_job:
                        self._is_polling = False
                        return
            if begun >= self._until:
                if is_asleep:
                    self._end_without_news(1)
                else:
                    self._is_polling = False  # the peer was not late: it waits for the reply of this worker's threads
                return
            self._give_way()
            # While one of the worker's own threads is at work, it is the one that takes the CPU
            if is_asleep and (away_s := self._clock() - begun) > _SHARED_S:
                self._end_without_news(1 if away_s < self.longest_s else _PRICE_OF_SHARING)
                return
        self._schedule(loop)

    def _end_without_news(self, price: int) -> None:
        self._is_polling = False
        self.empty_polls += 1
        self._credit = max(0, self._credit - price)
        if not self._credit:
            self._pause = min(_LONGEST_PAUSE, 2 * self._pause)

    # -- which connections are worth it

    def _check_in(self, delay_s: float, loop: asyncio.AbstractEventLoop) -> None:
        call_at = self.call_at or loop.call_at
        self._timer = call_at(loop.time() + delay_s, partial(self._check, loop))

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check whether connections that are not polled should be."""
        received = sum([connection.bytes_received for connection in self._connections])
        self._silent = 0 if received != self._bytes else self._silent + 1
        self._bytes = received
        self._check_all(self._clock())
        if not self._credit:
            self._credit = _FIRST_CREDIT  # polling may have become worth it
        is_rare = self._silent >= _SILENT or self._is_any_polled
        self._check_in(_SELDOM_S if is_rare and self._pause == 1 else _CHECK_S * self._pause, loop)

    def _check_all(self, now: float) -> None:
        others_s = self._other_threads_s()
        self._is_crowded = others_s - self._others_s > _BUSY_SHARE * (now - self._checked_at)
        self._checked_at, self._others_s = now, others_s
        cpus = _own_cpus()
        is_worth_it = False
        for connection in self._connections:
            is_worth_it |= self._decide(connection, cpus)
        self._is_any_polled = is_worth_it
        self._is_polling &= is_worth_it

    def _other_threads_s(self) -> float:
        """Return the CPU time of the threads of this process that are not the worker's own."""
        return _others_s() - sum([pool.cpu_s for pool in self.pools])

    def _decide(self, connection: StreamConnection, cpus: set[int]) -> bool:
        is_worth_it = not self._is_crowded and can_run_at_once(connection, cpus)
        connection.set_busy_poll(self if is_worth_it else None)
        return is_worth_it

    def statistics(self) -> dict[str, int]:
        """Return the counts of polls, of polls that found nothing, and of connections, polled now or not."""
        return {"polls": self.polls, "empty_polls": self.empty_polls, "connections": len(self._connections)}


def can_run_at_once(connection: StreamConnection, cpus: set[int] | None = None) -> bool:
    """Whether this process and the peer's need not share a CPU, so that both can run at the same time."""
    cpus = cpus or _own_cpus()
    if len(cpus) > 1 or not connection.is_local:
        return True
    process = connection.peer_process
    try:
        return process is not None and not os.sched_getaffinity(process) <= cpus
    except OSError:  # the process is in another PID namespace, or has ended
        return False


def _own_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _others_s() -> float:
    """Return the CPU time of the other threads of this process."""
    return process_time() - thread_time()


def yield_cpu() -> None:
    """Let other programs run that wait for this CPU, on systems where a thread can do that."""
    if hasattr(os, "sched_yield"):
        os.sched_yield()
