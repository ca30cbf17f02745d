"""The members of a group: their names, roles and ranks, and the environment variables of each."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from arpc.errors import ConfigurationError
from arpc.ids import MAX_WORKER_ID, check_worker_name

__all__ = [
    "Group",
    "MeetingPoint",
    "Slot",
    "as_group",
    "check_environment",
    "environment_of",
    "on_nodes",
    "parse_resources",
    "parse_roles",
]

DEFAULT_ROLE: Final = "worker"

Group: TypeAlias = int | Mapping[str, int]
"""The number of workers, or the number for each role."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one worker in its group; it stays the same when the group is started again."""

    name: str
    role: str
    rank: int
    role_rank: int
    role_size: int
    world_size: int


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """The address where the workers of one incarnation of a group find each other, and the file with their secret."""

    host: str
    port: int
    incarnation: int = 0
    max_restarts: int = 0
    secret_file: Path | None = None


def parse_roles(text: str) -> dict[str, int]:
    """Read ``--role``.

    >>> parse_roles("ps=1,trainer=3")
    {'ps': 1, 'trainer': 3}
    """
    roles: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        role, equals, count = (word.strip() for word in part.partition("="))
        if not equals or not count.isdecimal():
            raise ConfigurationError(f"roles are given as ps=1,trainer=3; {part!r} is not a name and a number")
        if role in roles:
            raise ConfigurationError(f"the role {role!r} is given twice")
        roles[role] = int(count)
    return roles


def parse_resources(text: str) -> dict[str, float]:
    """Read ``--resources``.

    >>> parse_resources("CPU=2,GPU=0.5")
    {'CPU': 2.0, 'GPU': 0.5}
    """
    resources: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, amount = (word.strip() for word in part.partition("="))
        try:
            resources[name] = float(amount)
        except ValueError:
            raise ConfigurationError(
                f"resources are given as CPU=2,GPU=1; {part!r} is not a name and a number"
            ) from None
    return resources


def as_group(workers: Group) -> tuple[Slot, ...]:
    """Return the slots of a group in the order of their ranks: role after role, in the order given.

    >>> [(slot.rank, slot.name) for slot in as_group({"ps": 1, "trainer": 2})]
    [(0, 'ps0'), (1, 'trainer0'), (2, 'trainer1')]
    """
    roles = {DEFAULT_ROLE: workers} if isinstance(workers, int) else dict(workers)
    for role, count in roles.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigurationError(f"a group has one worker or more of each role, not {count!r} of {role!r}")
    size = sum(roles.values())
    if not 1 <= size <= MAX_WORKER_ID + 1:
        raise ConfigurationError(f"a group has between 1 and {MAX_WORKER_ID + 1} workers, not {size}")
    slots: list[Slot] = []
    for role, count in roles.items():
        for number in range(count):
            name = f"{role}{number}"
            check_worker_name(name)
            slots.append(Slot(name, role, len(slots), number, count, size))
    if len({slot.name for slot in slots}) < size:  # ps=11 and ps1=1 both have a ps10
        raise ConfigurationError(f"two workers would have the same name: choose other roles than {', '.join(roles)}")
    return tuple(slots)


def environment_of(slot: Slot, meeting: MeetingPoint, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a worker beyond those that it inherits.

    The names that torchrun uses mean what they mean there, so that programs written for it, and process groups of torch
    next to arpc, work unchanged: the store is served by the launcher, and rank 0 is its client like any other.
    """
    made = {
        "ARPC_NAME": slot.name,
        "ARPC_ROLE": slot.role,
        "ARPC_ROLE_RANK": str(slot.role_rank),
        "ARPC_ROLE_SIZE": str(slot.role_size),
        "ARPC_INCARNATION": str(meeting.incarnation),
        "RANK": str(slot.rank),
        "WORLD_SIZE": str(slot.world_size),
        "LOCAL_RANK": str(slot.rank),
        "LOCAL_WORLD_SIZE": str(slot.world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": meeting.host,
        "MASTER_PORT": str(meeting.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(meeting.incarnation),
        "TORCHELASTIC_MAX_RESTARTS": str(meeting.max_restarts),
        # output must be visible when it is printed, also when the worker then dies
        "PYTHONUNBUFFERED": "1",
    }
    if meeting.secret_file is not None:
        made["ARPC_SECRET_FILE"] = str(meeting.secret_file)
    if "OMP_NUM_THREADS" not in inherited:
        # each process would use all CPUs, and the workers would compete for them
        made["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // slot.world_size))
    return made


def check_environment(environment: Mapping[str, str]) -> None:
    """Raise `ConfigurationError` for variables that no process can have in its environment."""
    for name, value in environment.items():
        if not isinstance(name, str) or not isinstance(value, str) or not name or "=" in name or "\0" in name + value:
            raise ConfigurationError(f"the environment of workers has names and strings, not {name!r}: {value!r}")


def on_nodes(nodes: Sequence[str]) -> list[dict[str, str]]:
    """Return the variables about its node for each rank; ``nodes`` has the node of each rank.

    >>> [place["LOCAL_RANK"] for place in on_nodes(["a", "b", "a"])]
    ['0', '0', '1']
    """
    sizes = Counter(nodes)
    numbers = {node: number for number, node in enumerate(sizes)}
    seen: Counter[str] = Counter()
    places = []
    for node in nodes:
        places.append(
            {
                "LOCAL_RANK": str(seen[node]),
                "LOCAL_WORLD_SIZE": str(sizes[node]),
                "GROUP_RANK": str(numbers[node]),
                "GROUP_WORLD_SIZE": str(len(sizes)),
            }
        )
        seen[node] += 1
    return places
