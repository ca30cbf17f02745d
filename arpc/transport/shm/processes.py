"""Detection of the end of another process, even of one that is killed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

__all__ = ["ProcessWatch"]


class ProcessWatch:
    """Notifies when a process of this host has ended. To be made while the process is known to run."""

    def __init__(self, pid: int, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        try:
            self._fd = os.pidfd_open(pid)
        except (OSError, OverflowError, AttributeError):
            self._fd = -1  # the process then counts as running for ever, which costs memory at most

    def call_at_end(self, callback: Callable[[], None]) -> None:
        """Call the callback on the loop once the process has ended, or soon if it has ended already."""
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
