"""Timers that a worker always has pending, and that cost nothing until they expire.

A loop with a pending timer passes a timeout to the kernel at every wait. The kernel sets up a timer of its own and
removes it again, each time: that is a twentieth of a small call between two workers on one CPU. Timers that are always
pending and far away, the next deadline and the next check of the peers, are kept here instead. The earliest of them is
set in the kernel once, as a timerfd, which wakes the loop as if a message had come.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from typing import Any, Final, Protocol, cast

__all__ = ["Alarm", "Alarms", "CallAt", "alarms_of"]

_CLOCK_MONOTONIC: Final = 1
_ABSOLUTE: Final = 1
_LONG_BYTES: Final = 8
# uvloop's clock counts whole milliseconds: a timer that expires a little late is due by that clock, too
_GRAIN_S: Final = 0.001
_LATEST_S: Final = 1e9
"""A time that is never reached. The kernel refuses times that it cannot represent, and later ones may be such."""


class Alarm(Protocol):
    """A scheduled callback that can be cancelled, like an `asyncio.TimerHandle`."""

    def cancel(self) -> None: ...


CallAt = Callable[[float, Callable[[], None]], Alarm]
"""Schedules a function for a time of the loop's clock."""


class _Alarm:
    __slots__ = ("_callback", "_waiting", "when")

    def __init__(self, waiting: list[_Alarm], when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self._callback = callback
        self._waiting = waiting
        waiting.append(self)

    def cancel(self) -> None:
        # the timerfd stays set: it then expires without a callback, and is set for the next timer
        with suppress(ValueError):  # it has rung
            self._waiting.remove(self)

    def ring(self) -> None:
        if self in self._waiting:
            self._waiting.remove(self)
            self._callback()


class Alarms:
    """A few timers in place of the loop's own. Raises `OSError` where the system cannot create a timerfd."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[_Alarm] = []
        self._set_for = float("inf")
        # from Python 3.13 on, `os` has these two
        self._libc: Any = cast("Any", ctypes.CDLL(None, use_errno=True))
        self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        loop.add_reader(self._fd, self._rang)

    def call_at(self, when: float, callback: Callable[[], None]) -> Alarm:
        """Call a function at that time of the loop's clock, or a millisecond later."""
        alarm = _Alarm(self._waiting, when, callback)
        if when < self._set_for:
            self._set(when)
        return alarm

    def close(self) -> None:
        """Cancel all timers."""
        self._waiting.clear()
        if self._close_fd.alive:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._fd)
            self._close_fd()

    def _set(self, when: float) -> None:
        if not self._close_fd.alive:
            return
        self._set_for = when
        seconds, rest_s = divmod(min(max(when, 0.0), _LATEST_S) + _GRAIN_S, 1)
        # no interval, then the time
        times = (ctypes.c_long * 4)(0, 0, int(seconds), int(rest_s * 1e9))
        if self._libc.timerfd_settime(self._fd, _ABSOLUTE, times, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def _rang(self) -> None:
        with suppress(BlockingIOError):  # the timer was set again meanwhile
            os.read(self._fd, 8)
        now = self._loop.time()
        self._set_for = float("inf")
        for alarm in sorted(self._waiting, key=attrgetter("when")):
            if alarm.when > now:
                self._set(alarm.when)
                break
            # After the messages that came at the same moment: a reply that has arrived is not too late
            self._loop.call_soon(alarm.ring)


def alarms_of(loop: asyncio.AbstractEventLoop) -> Alarms | None:
    """Return timers for this loop; None if the loop's own must be used.

    Only uvloop on Linux has them: other loops may have another clock, and cannot be waited for in this way.
    """
    is_uvloop = type(loop).__module__.partition(".")[0] == "uvloop"
    if sys.platform != "linux" or not is_uvloop or ctypes.sizeof(ctypes.c_long) != _LONG_BYTES:
        return None
    try:
        return Alarms(loop)
    except (OSError, AttributeError):  # no descriptor is left, or another C library
        return None
