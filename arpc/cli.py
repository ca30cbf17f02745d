"""The command ``arpc``.

A command is an entry of `COMMANDS`: a name, a sentence, a function that declares its arguments and one that runs and
returns the exit status. The standard library parses them, so that ``arpc`` works wherever arpc is installed; what a
command needs beyond that it asks for itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from arpc import __version__
from arpc.bench import command as bench
from arpc.launch import command as launch

__all__ = ["COMMANDS", "Command", "main"]


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand."""

    name: str
    about: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


COMMANDS: Final = (
    Command(
        "launch",
        "run a script as a group of workers, in processes of this machine",
        launch.add_arguments,
        launch.run,
    ),
    Command(
        "bench",
        "measure arpc against torch.distributed.rpc and the bare floor, on this machine",
        bench.add_arguments,
        bench.run,
    ),
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command that `arguments`, or else the process's own, ask for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="arpc", description="An asyncio-native RPC runtime for PyTorch.")
    parser.add_argument("--version", action="version", version=f"arpc {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        one = commands.add_parser(command.name, help=command.about, description=command.about)
        command.add_arguments(one)
        one.set_defaults(run_command=command.run)
    options = parser.parse_args(arguments)
    status: int = options.run_command(options)
    return status
