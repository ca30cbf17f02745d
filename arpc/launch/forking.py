"""Rules for forking workers from a process that has imported torch, and the command that starts that process."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from arpc.launch.template import BOOT

__all__ = ["can_fork", "can_fork_worker", "shared_environment", "template_command"]

_OWN: Final = re.compile(r"ARPC_\w+|((LOCAL|GROUP)_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+")
"""Environment variables that differ per worker: no module reads these when it is imported."""


def can_fork() -> bool:
    """Whether workers can be forked at all. macOS cannot adopt orphans, and its libraries do not survive a fork."""
    return sys.platform == "linux"


def template_command(command: Sequence[str]) -> list[str]:
    """Return the command of the process that these workers are forked from; the supervisor fills in the descriptor.

    The workers' command is appended so that ``ps`` shows it, and to leave room for the command line of each worker.
    """
    return [sys.executable, "-c", BOOT, "{descriptor}", *command[1:]]


def shared_environment(environment: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the environment of that process: a worker's, without the variables that differ per worker.

    >>> shared_environment({"OMP_NUM_THREADS": "1", "RANK": "0"})["RANK"]
    """
    own = {name for name in (*environment, *os.environ) if _OWN.fullmatch(name)}
    return {**environment, **dict.fromkeys(own)}


def can_fork_worker(
    command: Sequence[str], environment: Mapping[str, str | None], shared: Mapping[str, str | None]
) -> bool:
    """Whether a forked worker finds everything as if it had been started by its command.

    The command must run a script or a module with this Python, without options; and the environment must be that of
    the process it is forked from, ``shared``, except for variables that nothing has read there yet. A variable such as
    OMP_NUM_THREADS or LD_PRELOAD takes effect when a library is loaded, which has already happened.
    """
    if len(command) < 2 or command[0] != sys.executable:
        return False
    is_module = command[1] == "-m" and len(command) > 2
    is_script = not command[1].startswith("-") and Path(command[1]).suffix == ".py"  # not an archive, not compiled
    if not (is_module or is_script):
        return False
    return all(
        _OWN.fullmatch(name) or environment.get(name, os.environ.get(name)) == shared.get(name, os.environ.get(name))
        for name in environment.keys() | shared.keys()
    )
