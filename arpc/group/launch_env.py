"""The environment variables of the launcher that started this process: torchrun, ``arpc launch`` or Slurm.

All of them define ranks, a size and a place to meet. This module looks up torchrun's names for them; where these are
missing under ``srun``, it derives them from Slurm's variables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

from arpc.errors import ConfigurationError

__all__ = ["default_name", "first_host", "slurm_environment", "slurm_port", "variable", "whole_number"]

FIRST_PORT: Final = 15_000
PORTS: Final = 16_384
"""The size of a range of ports, below those that systems assign by themselves (32768 and up on Linux)."""

_SLURM: Final = ("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_JOB_ID")
"""Variables of every task of a step, which is what ``srun`` starts; a batch script itself has no step."""

_FIRST: Final = re.compile(r"\s*((?:[^,\[\]]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+)(?:,|$)")
"""Matches the text before the first comma that is outside of brackets, in which there are numbers."""


def variable(name: str, environment: Mapping[str, str] | None = None) -> str | None:
    """Return ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ... of this process; None if no launcher has set it."""
    environment = os.environ if environment is None else environment
    return environment.get(name) or slurm_environment(environment).get(name)


def whole_number(text: str, source: str) -> int:
    """Return the number in a setting. Raises `ConfigurationError`, which names the source, if it holds none."""
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{source} must be a whole number, not {text!r}") from None


def default_name(rank: int | None, environment: Mapping[str, str] | None = None) -> str:
    """Return a worker's default name: ``ARPC_NAME``, or else ``worker`` and its rank. Raises `ConfigurationError`."""
    name = variable("ARPC_NAME", environment)
    if name:
        return name
    number = variable("RANK", environment) if rank is None else str(rank)
    if number is None:
        raise ConfigurationError(
            "this worker has no name, and nothing says which of a group it is: start the script with `arpc launch -n 2 "
            "script.py` (or torchrun, or srun), or pass a name and a rank to init_rpc"
        )
    return f"worker{number}"


def slurm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun would have set, in a task that ``srun`` started; else none."""
    if any(not environment.get(name) for name in _SLURM):
        return {}
    size = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if not size or not nodes:
        return {}
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": first_host(nodes),
        "MASTER_PORT": str(slurm_port(environment["SLURM_JOB_ID"], environment["SLURM_STEP_ID"])),
    }


def slurm_port(job_id: str, step_id: str = "0") -> int:
    """Return a port that all tasks of a step agree on, and that other jobs of the host most likely do not have.

    >>> slurm_port("4242") == slurm_port("4242"), slurm_port("4242") == slurm_port("4243")
    (True, False)
    """
    try:
        job, step = int(job_id), int(step_id)
    except ValueError:
        raise ConfigurationError(f"SLURM_JOB_ID={job_id!r} and SLURM_STEP_ID={step_id!r} must be numbers") from None
    return FIRST_PORT + (job + 257 * step) % PORTS  # jobs of one host have ids that are close to each other


def first_host(nodelist: str) -> str:
    """Return the first host of one of Slurm's lists, where rank 0 runs. Raises `ConfigurationError` if there is none.

    >>> first_host("rack[1-2]node[08-10,12],login1")
    'rack1node08'
    """
    first = _FIRST.match(nodelist)
    if first is None:
        raise ConfigurationError(f"Slurm's list of nodes, {nodelist!r}, has none, or brackets that do not match")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[1].strip())
