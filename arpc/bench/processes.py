"""Finds the processes of a system: some systems start further processes, and daemons change their parent."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["die_with_parent", "family", "kill_family"]

_PR_SET_PDEATHSIG = 1


class _Links(NamedTuple):
    pid: int
    parent: int
    session: int


def die_with_parent() -> None:
    """Make the kernel kill this process as soon as the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def family(leaders: Iterable[int], sessions: Iterable[int] = ()) -> set[int]:
    """Return the `leaders`, their descendants, and all processes of the sessions that they lead or led.

    A process that was reaped must not be among the `leaders`, since its pid may be another process's by now. The
    members of a session keep its number from being reused, so it may still be among the `sessions`.
    """
    processes = list(_all_processes())
    wanted = set(leaders)
    named = wanted | set(sessions)
    found = {one.pid for one in processes if one.pid in wanted or one.session in named}
    grown = True
    while grown:
        more = {one.pid for one in processes if one.parent in found} - found
        found |= more
        grown = bool(more)
    return found


def kill_family(leaders: Iterable[int], sessions: Iterable[int] = ()) -> None:
    """Kill all of them. Their parent has to reap the leaders, and init reaps the others."""
    for pid in family(leaders, sessions) - {os.getpid()}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _all_processes() -> Iterable[_Links]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended since it was listed
                # The name, in brackets, may hold anything; then state, parent, group, session: see proc(5).
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                yield _Links(int(entry.name), int(fields[1]), int(fields[3]))
