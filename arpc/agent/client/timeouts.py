"""From the timeout of a call to its deadline."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, Final

from arpc.agent.client.deadlines import NEVER, Deadlines
from arpc.agent.server.functions import name_of
from arpc.errors import RpcTimeoutError, not_run
from arpc.options import UNSET, Unset
from arpc.wire.frames import MAX_TIMEOUT_MS

__all__ = ["Timeouts"]

_MAX_TIMEOUT_S: Final = MAX_TIMEOUT_MS / 1000  # seven weeks: as good as none
_MAX_KEPT: Final = 16

Deadline = tuple[int, int, float]
"""The tick at which a call expires, the milliseconds that the peer is told (0 for none), until when these two hold."""


class Timeouts:
    """The deadlines of the calls of one worker."""

    def __init__(self, deadlines: Deadlines, default_s: float, *, are_sent: bool) -> None:
        """``are_sent``: peers are told how much time a call has."""
        self._deadlines = deadlines
        self._time: Callable[[], float] = deadlines.now
        self._are_sent = are_sent
        self._default_s = default_s
        # Calls with the same timeout made at about the same time have the same tick: that is found once for all
        self._kept: dict[float, Deadline] = {}

    @property
    def default_s(self) -> float:
        """Seconds for calls that do not say; 0 for none."""
        return self._default_s

    @default_s.setter
    def default_s(self, timeout_s: float) -> None:
        if not timeout_s >= 0:
            raise ValueError(f"a timeout is 0 (none) or more seconds, not {timeout_s!r}")
        self._default_s = timeout_s

    def deadline(self, timeout: float | Unset) -> Deadline:
        """The deadline of a call that is made for no caller."""
        timeout_s = self._default_s if timeout is UNSET else checked_timeout(timeout)
        now = self._time()
        kept = self._kept.get(timeout_s)
        if kept is None or now >= kept[2]:
            if len(self._kept) > _MAX_KEPT:
                self._kept.clear()
            kept = self._kept[timeout_s] = self._find(now, timeout_s)
        return kept

    def within(self, inherited: float | None, timeout: float | Unset, function: Any) -> Deadline:
        """The deadline of a call that a handler makes, which has a deadline of its own, ``inherited``.

        Raises `RpcTimeoutError` if that has passed.
        """
        if inherited is None:
            return self.deadline(timeout)
        timeout_s = self._default_s if timeout is UNSET else checked_timeout(timeout)
        now = self._time()
        left = inherited - now
        if left <= 0:
            text = f"no time is left to call {name_of(function)}: the caller's own deadline has passed"
            raise not_run(RpcTimeoutError(text))
        return self._find(now, min(timeout_s, left) if timeout_s else left)

    def _find(self, now: float, timeout_s: float) -> Deadline:
        if not timeout_s:
            return NEVER, 0, inf
        timeout_s = min(timeout_s, _MAX_TIMEOUT_S)
        tick = self._deadlines.tick(now, timeout_s)
        timeout_ms = max(1, int(timeout_s * 1000)) if self._are_sent else 0
        return tick, timeout_ms, self._deadlines.time_of(tick) - timeout_s


def checked_timeout(timeout: Any) -> float:
    """A timeout in seconds. Raises `TypeError` or `ValueError` for what is none."""
    if not isinstance(timeout, int | float):
        raise TypeError(f"a timeout is a number of seconds, 0 for none, not {timeout!r}")
    if not timeout >= 0:
        raise ValueError(f"a timeout is 0 (none) or more seconds, not {timeout!r}")
    return float(timeout)
