"""``arpc ps``: the groups of this user on this host, without asking any of their workers."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence

import msgspec

from arpc.console.numbers import age
from arpc.errors import ArpcError
from arpc.metrics.attach import Attachable, attachable

__all__ = ["by_group", "describe", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Print the groups, the newest first; return the exit status."""
    try:
        groups = by_group(attachable())
    except ArpcError as error:
        sys.stderr.write(f"arpc ps: {error}\n")
        return 1
    if arguments.json:
        sys.stdout.write(msgspec.json.encode(groups).decode() + "\n")
    else:
        sys.stdout.write("\n".join(describe(groups, time.time())) + "\n")
    return 0


def by_group(workers: Sequence[Attachable]) -> list[list[Attachable]]:
    """Return the workers by meeting place, in the order of their ids; the group with the newest worker first."""
    groups: dict[str, list[Attachable]] = {}
    for worker in workers:
        groups.setdefault(worker.group, []).append(worker)
    return [sorted(group, key=lambda worker: (worker.id, worker.name)) for group in groups.values()]


def describe(groups: Sequence[Sequence[Attachable]], now_s: float) -> Iterator[str]:
    """Yield a line for each group, and one for each of its workers on this host."""
    if not groups:
        yield "no worker of this user runs on this host"
    for group in groups:
        started_s = min(worker.started_s for worker in group)
        size = f"{len(group)} worker{'s' if len(group) > 1 else ''} here"
        page = next((f", dashboard {worker.http}" for worker in group if worker.http), "")
        yield f"group {group[0].group}: {size}, {age(max(0.0, now_s - started_s))}{page}"
        width = max(len(worker.name) for worker in group)
        for worker in group:
            yield f"  {worker.name:{width}}  id {worker.id}  process {worker.pid}"
