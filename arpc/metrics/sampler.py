"""A timer that measures the lag of the loop, and keeps the history of the last minute and the last hour."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from arpc.metrics.history import History

__all__ = ["Sampler"]

_PROBE_S: Final = 0.1
_PROBES_PER_SECOND: Final = 10
_LAG_PROBES: Final = 100
_TOTALS: Final = ("calls", "handled", "errors", "sent_bytes", "received_bytes", "cpu_s")
_LEVELS: Final = ("in_flight", "handlers", "lag_s", "memory_bytes")
_HOUR_STEP_S: Final = 10
_HOUR_STEPS: Final = 360


class Sampler:
    """Probes the loop ten times a second, and reads totals and levels once a second."""

    def __init__(self, loop: asyncio.AbstractEventLoop, read: Callable[[], dict[str, float]]) -> None:
        self.history = History(_TOTALS, _LEVELS)
        self.hour = History(_TOTALS, _LEVELS, _HOUR_STEPS)
        """In steps of ten seconds: rates are means, levels are those at the end of a step, the lag is the worst."""
        self.lag_s = 0.0
        self._loop = loop
        self._read = read
        self._recent: deque[float] = deque(maxlen=_LAG_PROBES)
        self._expected = 0.0
        self._probes = 0
        self._sampled_at = self._hour_sampled_at = time.monotonic()
        self._hour_lag_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._arm()

    @property
    def lag_max_s(self) -> float:
        """The worst lag of the last ten seconds."""
        return max(self._recent, default=0.0)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        # not the loop's own time: uvloop's stands still while callbacks run
        self._expected = time.monotonic() + _PROBE_S
        self._timer = self._loop.call_later(_PROBE_S, self._probe)

    def _probe(self) -> None:
        now = time.monotonic()
        self.lag_s = max(0.0, now - self._expected)
        self._recent.append(self.lag_s)
        self._probes += 1
        if self._probes % _PROBES_PER_SECOND == 0:
            worst_s = max(list(self._recent)[-_PROBES_PER_SECOND:])
            values = {**self._read(), "lag_s": worst_s}
            self.history.sample(values, now - self._sampled_at)
            self._sampled_at = now
            self._hour_lag_s = max(self._hour_lag_s, worst_s)
            if self._probes % (_PROBES_PER_SECOND * _HOUR_STEP_S) == 0:
                self.hour.sample({**values, "lag_s": self._hour_lag_s}, now - self._hour_sampled_at)
                self._hour_sampled_at, self._hour_lag_s = now, 0.0
        self._arm()
