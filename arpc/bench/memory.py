"""Resident memory of a process, seen from any process of the same user, and stalls of an event loop."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

__all__ = ["StallWatch", "forget_peak", "peak_bytes", "resident_bytes"]


def resident_bytes(pid: int) -> int:
    """Return the memory that is resident now."""
    return _status_bytes(pid, "VmRSS:")


def peak_bytes(pid: int) -> int:
    """Return the most memory that was resident at one time since `forget_peak`."""
    return _status_bytes(pid, "VmHWM:")


def forget_peak(pid: int) -> None:
    """Reset the peak."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # 5: reset the peak of the resident set, see proc(5)


def _status_bytes(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/{pid}/status has no {field}")


class StallWatch:
    """Measures the longest stall of the running loop, from its construction until `stop`."""

    _TICK_S = 0.005

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._longest_s = 0.0
        self._last = time.perf_counter()
        self._timer = self._loop.call_later(self._TICK_S, self._tick)

    def stop(self) -> float:
        """End the watch; return the longest stall in seconds."""
        self._timer.cancel()
        self._note()
        return self._longest_s

    def _tick(self) -> None:
        self._note()
        self._timer = self._loop.call_later(self._TICK_S, self._tick)

    def _note(self) -> None:
        now = time.perf_counter()
        self._longest_s = max(self._longest_s, now - self._last - self._TICK_S)
        self._last = now
