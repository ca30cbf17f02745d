"""The command ``arpc``.

A command is an entry of `COMMANDS`: a name, a sentence, and a module of arpc with a function ``add_arguments`` that
declares its arguments and one, ``run``, that runs it and returns the exit status. The standard library parses them, so
that ``arpc`` works wherever arpc is installed; what a command needs beyond that it asks for itself.

This is a package of its own because importing anything of arpc imports torch, which takes seconds: ``arpc --version``
and ``arpc --help`` do without, and only the module of the command that is run is imported.
"""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

__all__ = ["COMMANDS", "Command", "main"]


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand."""

    name: str
    about: str
    module: str

    def load(self) -> Any:
        """What declares its arguments and runs it."""
        return importlib.import_module(self.module)


COMMANDS: Final = (
    Command("launch", "run a script as a group of workers, in processes of this machine", "arpc.launch.command"),
    Command(
        "bench",
        "measure arpc against torch.distributed.rpc and the bare floor, on this machine",
        "arpc.bench.command",
    ),
    Command("certs", "make a certificate authority for tests, and certificates of workers", "arpc.certs"),
    Command("top", "watch a running group: its workers, calls, connections and RRefs", "arpc.console.top"),
    Command(
        "stack",
        "print what every worker of a running group waits for, call by call and await by await",
        "arpc.console.stack",
    ),
    Command(
        "trace",
        "record all workers of a running group for some seconds, in one trace for Perfetto or a browser",
        "arpc.console.trace",
    ),
)


class _PrintVersion(argparse.Action):
    """``--version``: the one that packaging knows, read without importing arpc."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        spec = find_spec("arpc")
        assert spec is not None, "arpc_cli is installed with arpc"
        assert spec.origin is not None, "arpc is a package with an __init__.py"
        found = runpy.run_path(str(Path(spec.origin).with_name("_version.py")))
        print(f"arpc {found['__version__']}")  # noqa: T201 - that is what it is for
        parser.exit()


class _PrintCompletion(argparse.Action):
    """``--print-completion SHELL``: writes what a shell needs to complete commands and options, and stops."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        try:
            import shtab
        except ImportError:
            parser.error("completion takes shtab: pip install 'arpc[cli]'")
        print(shtab.complete(_parser(COMMANDS), shell=str(values)))  # noqa: T201 - that is what it is for
        parser.exit()


def _parser(loaded: Sequence[Command]) -> argparse.ArgumentParser:
    """Knows all commands, and the arguments of some."""
    parser = argparse.ArgumentParser(prog="arpc", description="An asyncio-native RPC runtime for PyTorch.")
    parser.add_argument("--version", nargs=0, action=_PrintVersion, help="print the version")
    parser.add_argument(
        "--print-completion",
        choices=("bash", "zsh", "tcsh"),
        action=_PrintCompletion,
        help="print what makes the shell complete commands and options; takes shtab",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        one = commands.add_parser(command.name, help=command.about, description=command.about)
        if command in loaded:
            module = command.load()
            module.add_arguments(one)
            one.set_defaults(run_command=module.run)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command that `arguments`, or else the process's own, ask for; returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    # The options before a command take no value, but for one, and that is no name of a command
    asked = next((word for word in words if not word.startswith("-")), None)
    options = _parser([command for command in COMMANDS if command.name == asked]).parse_args(words)
    status: int = options.run_command(options)
    return status
