"""Polling of a thread for the reply to its call, before it sleeps.

An idle CPU takes much longer to wake up than most replies take, see `arpc.transport.busy_poll`. A thread that polls
takes the interpreter lock again and again. So it polls only while no other thread calls the same peer, and only if most
polls have found their reply lately.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final

from arpc.transport.busy_poll import yield_cpu

__all__ = ["ReplyPoll"]

_FIRST_CREDIT: Final = 20
_CREDIT: Final = 50
_PRICE: Final = 10
"""The credit that a poll without a reply costs; a poll with one earns 1."""
_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 0.2
_CHECK_S: Final = 0.25
"""The interval between checks whether the peer can run at the same time."""


class ReplyPoll:
    """The polling of one worker's blocking calls to one peer. Its methods are called in any thread."""

    def __init__(
        self,
        longest_s: float,
        is_worth_it: Callable[[], bool],
        clock: Callable[[], float] = perf_counter,
        give_way: Callable[[], object] | None = None,
    ) -> None:
        """A poll ends after ``longest_s``. ``is_worth_it``: whether the peer need not share a CPU with this process."""
        self._longest_s = longest_s
        self._is_worth_it = is_worth_it
        self._clock = clock
        self._give_way = give_way or yield_cpu
        self._alone = threading.Lock()
        """Held by the call that polls."""
        self._is_crowded = False
        """Whether another call was made while one had the lock."""
        self._credit = _FIRST_CREDIT
        self._pause_s = _PAUSE_S
        self._not_before = 0.0
        """The time of the next check, or of the end of a pause."""
        self._is_on = False

    def wait(self, has_input: Callable[[int], Any]) -> None:
        """Return when ``has_input(0)`` is true, or polling is not worth it any more."""
        now = self._clock()
        if now >= self._not_before:
            self._check(now)
        if not self._is_on:
            return
        if not self._alone.acquire(blocking=False):
            self._is_crowded = True
            return
        try:
            self._is_crowded = False
            until = now + self._longest_s
            while not has_input(0):
                now = self._clock()
                if now >= until or self._is_crowded:
                    self._missed(now)
                    return
                self._give_way()
            self._pause_s = _PAUSE_S
            self._credit = min(self._credit + 1, _CREDIT)
        finally:
            self._alone.release()

    def _check(self, now: float) -> None:
        self._not_before = now + _CHECK_S
        self._is_on = self._longest_s > 0 and self._is_worth_it()
        if self._credit <= 0:
            self._credit = _PRICE  # polling may have become worth it: one attempt

    def _missed(self, now: float) -> None:
        self._credit -= _PRICE
        if self._credit <= 0:
            self._is_on = False
            self._not_before = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
