"""``arpc stack``."""

from __future__ import annotations

import argparse

from arpc.commands.attach import add_attach_arguments

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_attach_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(options: argparse.Namespace) -> int:
    """Print what every worker waits for; returns the exit status."""
    from arpc.console import stack  # slow: imports torch

    return stack.run(options)
