"""Children of killed workers: they become children of the runner, which waits for their end."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["Orphans"]

_PR_SET_CHILD_SUBREAPER: Final = 36
_POLL_S: Final = 0.1


class Orphans:
    """Adopts, from its construction on, descendants whose parents end before them."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "cannot adopt orphaned processes")
        self._own = set(_children())

    def own(self) -> None:
        """Exempt the present children of this process: they are not orphans."""
        self._own |= set(_children())

    def reap(self, limit_s: float) -> int:
        """Wait until all adopted processes have ended; kill those left after `limit_s`, and return their number."""
        end = time.monotonic() + limit_s
        late = 0
        while left := [pid for pid in _children() if pid not in self._own and not _has_ended(pid)]:
            if time.monotonic() > end:
                late += len(left)
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
            time.sleep(_POLL_S)
        return late


def _children() -> list[int]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has just ended
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
