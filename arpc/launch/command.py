"""The ``arpc launch`` command."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from pathlib import Path
from typing import Final

from arpc.errors import ConfigurationError, LaunchError
from arpc.launch.life import exit_status
from arpc.launch.local_group import LocalGroup, Settings
from arpc.launch.meeting import choose_http
from arpc.launch.output import Screen
from arpc.launch.plan import Group, as_group, parse_resources, parse_roles
from arpc.launch.programs import Module, Program, command_for
from arpc.launch.ray_cluster import ray
from arpc.runner import run as run_to_its_end

__all__ = ["run"]

USAGE_STATUS: Final = 2


def run(options: argparse.Namespace) -> int:
    """Launch the requested group. Return the exit status of the worker that failed first, or 0."""
    try:
        group: Group = options.workers if options.role is None else parse_roles(options.role)
        program: Program = Module(options.program) if options.module else options.program
        if options.on == "ray" and options.elastic:
            raise ConfigurationError("--elastic is for groups of this machine: Ray restarts a group as a whole")
        if options.on == "ray":
            run_to_its_end(_launch_on_ray(program, group, options))
        else:
            return asyncio.run(_launch_here(program, group, options))
    except ConfigurationError as error:
        _complain(error)
        return USAGE_STATUS
    except LaunchError as error:
        _complain(error)
        return exit_status(error.exit_code or 1)
    except KeyboardInterrupt:
        return exit_status(-signal.SIGINT)
    return 0


def _complain(error: Exception) -> None:
    print(f"arpc launch: {error}", file=sys.stderr)  # noqa: T201 - a message for the user


async def _launch_here(program: Program, group: Group, options: argparse.Namespace) -> int:
    slots = as_group(group)
    http = None if options.dashboard is None else choose_http(options.dashboard)
    settings = Settings(options.max_restarts, options.grace, {}, http, options.fork, options.elastic)
    screen = Screen(slots)
    with tempfile.TemporaryDirectory(prefix="arpc-launch-") as name:
        command = command_for(program, options.arguments, Path(name))
        launch = LocalGroup(slots, command, settings, Path(name), screen)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                loop.add_signal_handler(number, launch.interrupt, number)
        outcome = await launch.run()
    if outcome.interrupted_by is not None:
        return exit_status(-outcome.interrupted_by)
    if outcome.failure is not None:
        failure = launch.failure_of(outcome)
        if failure.traceback:
            screen.say(f"\n{failure.traceback}")
        screen.say(f"\narpc launch: {failure}", is_bad=True)
        return exit_status(outcome.failure.exit_code)
    return 0


async def _launch_on_ray(program: Program, group: Group, options: argparse.Namespace) -> None:
    """Launch on Ray, which forwards the workers' output to this process, prefixed with their names, tracebacks too."""
    await ray(
        program,
        options.arguments,
        workers=group,
        max_restarts=options.max_restarts,
        resources=parse_resources(options.resources),
        strategy=options.strategy,
        http=options.dashboard or None,
    )
