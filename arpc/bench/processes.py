"""Which processes belong to a system: some start more of them, and daemons change their parent."""

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
    """Makes the kernel kill this process as soon as the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def family(leaders: Iterable[int], sessions: Iterable[int] = ()) -> set[int]:
    """The `leaders`, all who descend from them, and all of the sessions that they lead or led.

    Who has been reaped is no leader any more, since the number may be somebody else's by now; the members of a session
    keep its number from being used again, so that it can still be named in `sessions`.
    """
    everybody = list(_everybody())
    wanted = set(leaders)
    named = wanted | set(sessions)
    found = {one.pid for one in everybody if one.pid in wanted or one.session in named}
    grown = True
    while grown:
        more = {one.pid for one in everybody if one.parent in found} - found
        found |= more
        grown = bool(more)
    return found


def kill_family(leaders: Iterable[int], sessions: Iterable[int] = ()) -> None:
    """Ends them all at once. The leaders are left to their parent to reap, the others to init."""
    for pid in family(leaders, sessions) - {os.getpid()}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _everybody() -> Iterable[_Links]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended since it was listed
                # The name, in brackets, may hold anything; then state, parent, group, session: see proc(5).
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                yield _Links(int(entry.name), int(fields[1]), int(fields[3]))
