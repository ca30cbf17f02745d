"""Which workers may be forked from a process that has imported torch, and how that process is started."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from arpc.launch.template import BOOT

__all__ = ["can_fork", "makes_no_difference", "shared_environment", "template_command"]

_OWN: Final = re.compile(r"ARPC_\w+|((LOCAL|GROUP)_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+")
"""Variables that workers have of their own: nothing reads these while it is imported."""


def can_fork() -> bool:
    """Whether workers can be forked at all. macOS has no way to adopt orphans, and libraries that do not survive it."""
    return sys.platform == "linux"


def template_command(command: Sequence[str]) -> list[str]:
    """What runs the process that workers with this command are forked from; the keeper fills in the descriptor.

    The command is there to be seen by ``ps``, and leaves room for that of the workers.
    """
    return [sys.executable, "-c", BOOT, "{descriptor}", *command[1:]]


def shared_environment(environment: Mapping[str, str | None]) -> dict[str, str | None]:
    """The environment of that process: a worker's, without what is that worker's own.

    >>> shared_environment({"OMP_NUM_THREADS": "1", "RANK": "0"})["RANK"]
    """
    own = {name for name in (*environment, *os.environ) if _OWN.fullmatch(name)}
    return {**environment, **dict.fromkeys(own)}


def makes_no_difference(
    command: Sequence[str], environment: Mapping[str, str | None], shared: Mapping[str, str | None]
) -> bool:
    """Whether a worker that is forked finds all as if it had been started by its command.

    It must be Python that runs a script or a module, without options; and its environment must be that of the process
    it is forked from, ``shared``, but for what nobody has read there yet. A variable such as OMP_NUM_THREADS or
    LD_PRELOAD counts when a library is loaded, and that is over.
    """
    if len(command) < 2 or command[0] != sys.executable:
        return False
    is_module = command[1] == "-m" and len(command) > 2
    is_script = not command[1].startswith("-") and Path(command[1]).suffix == ".py"  # no archive, nothing compiled
    if not (is_module or is_script):
        return False
    return all(
        _OWN.fullmatch(name) or environment.get(name, os.environ.get(name)) == shared.get(name, os.environ.get(name))
        for name in environment.keys() | shared.keys()
    )
