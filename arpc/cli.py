"""The command ``arpc``.

A command is an entry of `COMMANDS`: a name, a sentence, a function that declares its arguments, and one that runs it
and returns the exit status. The standard library parses the arguments, so that ``arpc`` works wherever arpc is
installed. A command imports its other dependencies when it runs, so that help, errors and completion are immediate.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from arpc._version import __version__
from arpc.commands import bench, certs, launch, ps, stack, top, trace
from arpc.commands.fish_completion import fish_completion
from arpc.extras import install_command

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
        "measure arpc, torch.distributed.rpc and a bare asyncio protocol on this machine",
        bench.add_arguments,
        bench.run,
    ),
    Command(
        "certs",
        "create a certificate authority for trying out TLS, and certificates for workers",
        certs.add_arguments,
        certs.run,
    ),
    Command("ps", "list the groups of this user that run on this host", ps.add_arguments, ps.run),
    Command("top", "watch a running group: its workers, calls, connections and RRefs", top.add_arguments, top.run),
    Command(
        "stack",
        "print what every worker of a running group waits for, call by call and await by await",
        stack.add_arguments,
        stack.run,
    ),
    Command(
        "trace",
        "record all workers of a running group for some seconds, in one trace for Perfetto or a browser",
        trace.add_arguments,
        trace.run,
    ),
)


class _PrintCompletion(argparse.Action):
    """``--print-completion SHELL``: prints a script that makes the shell complete commands and options, and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        if values == "fish":
            print(fish_completion(parser), flush=True)  # noqa: T201 - the output of the option
            parser.exit()
        try:
            import shtab
        except ImportError:
            parser.error(f"shell completion needs shtab: {install_command('cli')}")
        print(shtab.complete(parser, shell=str(values)), flush=True)  # noqa: T201 - the output of the option
        parser.exit()


def main(arguments: list[str] | None = None) -> int:
    """Run the command that `arguments` name, by default those of the process; return the exit status."""
    parser = argparse.ArgumentParser(prog="arpc", description="An asyncio-native RPC runtime for PyTorch.")
    parser.add_argument("--version", action="version", version=f"arpc {__version__}")
    parser.add_argument(
        "--print-completion",
        choices=("bash", "zsh", "tcsh", "fish"),
        action=_PrintCompletion,
        help="print a completion script for this shell; for all but fish, shtab must be installed",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        one = commands.add_parser(command.name, help=command.about, description=command.about)
        command.add_arguments(one)
        one.set_defaults(run_command=command.run)
    try:
        options = parser.parse_args(arguments)
        if "run_command" not in options:
            parser.print_help()
            return 0
        status: int = options.run_command(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as in `arpc ps | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python fails to flush at its exit
        return 128 + signal.SIGPIPE
    return status
