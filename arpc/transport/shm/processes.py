"""Noticing the end of another process, even one that is killed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

__all__ = ["ProcessWatch"]


class ProcessWatch:
    """Tells when a process of this host has ended. Made while it is known to live."""

    def __init__(self, pid: int, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        try:
            self._fd = os.pidfd_open(pid)
        except (OSError, OverflowError, AttributeError):
            self._fd = -1  # then it is taken to live for ever, which costs memory at most

    def call_at_end(self, callback: Callable[[], None]) -> None:
        """Call this on the loop once the process has ended, which it may have already."""
        if self._fd >= 0:
            self._loop.add_reader(self._fd, callback)

    def stop_waiting(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)

    def close(self) -> None:
        self.stop_waiting()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
