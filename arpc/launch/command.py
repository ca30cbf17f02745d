"""What ``arpc launch`` runs."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from arpc.errors import ArpcError, ConfigurationError
from arpc.launch.life import exit_status
from arpc.launch.local import LocalGroup, Settings
from arpc.launch.output import Screen
from arpc.launch.plan import Group, Slot, as_group, parse_roles
from arpc.launch.programs import Module, Program, command_for

__all__ = ["add_arguments", "run"]

DASHBOARD = "127.0.0.1:8265"
USAGE_STATUS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be asked of a launch."""
    how_many = parser.add_mutually_exclusive_group(required=True)
    how_many.add_argument("-n", "--workers", type=int, metavar="N", help="workers named worker0, worker1, ...")
    how_many.add_argument("--role", metavar="ROLES", help="workers by role: ps=1,trainer=3 are ps0, trainer0, ...")
    parser.add_argument("-m", "--module", action="store_true", help="PROGRAM is a module, as for python -m")
    parser.add_argument("--max-restarts", type=int, default=0, metavar="N", help="start a group that failed again (0)")
    parser.add_argument(
        "--grace", type=float, default=10.0, metavar="SECONDS", help="what workers get to end in good order (10)"
    )
    parser.add_argument(
        "--dashboard",
        nargs="?",
        const=DASHBOARD,
        metavar="HOST:PORT",
        help=f"have the worker of rank 0 serve the group's dashboard, at {DASHBOARD} if not said",
    )
    parser.add_argument("program", metavar="PROGRAM", help="the script that every worker runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="what follows is for the script")


def run(options: argparse.Namespace) -> int:
    """Launches what was asked for; returns the exit status of the worker that failed first, or 0."""
    try:
        group: Group = options.workers if options.role is None else parse_roles(options.role)
        slots = as_group(group)
        settings = Settings(options.max_restarts, options.grace, {}, options.dashboard)
        program: Program = Module(options.program) if options.module else options.program
        with tempfile.TemporaryDirectory(prefix="arpc-launch-") as directory:
            return asyncio.run(_launch(slots, program, options.arguments, settings, Path(directory)))
    except ConfigurationError as error:
        print(f"arpc launch: {error}", file=sys.stderr)  # noqa: T201 - it talks to a person
        return USAGE_STATUS


async def _launch(
    slots: Sequence[Slot], program: Program, arguments: Sequence[str], settings: Settings, directory: Path
) -> int:
    screen = Screen(slots)
    group = LocalGroup(slots, command_for(program, arguments, directory), settings, directory, screen)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, group.interrupt, number)
    if settings.http is not None:
        screen.say(f"dashboard: http://{settings.http}")
    try:
        outcome = await group.run()
    except ArpcError as error:
        screen.say(f"arpc launch: {error}", is_bad=True)
        return 1
    if outcome.is_success:
        return 0
    if outcome.interrupted_by is not None:
        return exit_status(-outcome.interrupted_by)
    failure = group.failure_of(outcome)
    if failure.traceback:
        screen.say(f"\n{failure.traceback}")
    screen.say(f"\narpc launch: {failure}", is_bad=True)
    assert outcome.failure is not None
    return exit_status(outcome.failure.exit_code)
