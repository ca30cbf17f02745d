"""``arpc top``."""

from __future__ import annotations

import argparse
from typing import Final

from arpc.commands.attach import add_attach_arguments

__all__ = ["add_arguments", "run"]

VIEWS: Final = ("workers", "functions", "peers", "rrefs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_attach_arguments(parser)
    parser.add_argument("--view", choices=VIEWS, default="workers", help="which table comes first")
    parser.add_argument("--sort", help="the title of the column to sort by")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="time between two updates (default 1)"
    )
    parser.add_argument("--once", action="store_true", help="print all tables once, and end")
    parser.add_argument("--json", action="store_true", help="print everything once, as JSON, and end")


def run(options: argparse.Namespace) -> int:
    """Show the group until the user quits, or once; returns the exit status."""
    from arpc.console import top  # slow: imports torch

    return top.run(options)
