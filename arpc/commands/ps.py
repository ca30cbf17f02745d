"""``arpc ps``."""

from __future__ import annotations

import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(options: argparse.Namespace) -> int:
    """Print which groups run on this host; returns the exit status."""
    from arpc.console import ps  # slow: imports torch

    return ps.run(options)
