"""``arpc trace``."""

from __future__ import annotations

import argparse
from pathlib import Path

from arpc.commands.attach import add_attach_arguments
from arpc.metrics.limits import MAX_TRACE_S

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_attach_arguments(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("arpc-trace.json"),
        help="the file to write: .json for https://ui.perfetto.dev, .html for any browser (default arpc-trace.json)",
    )
    parser.add_argument(
        "-t", "--seconds", type=float, default=5.0, help=f"how long to record, at most {MAX_TRACE_S:g} (default 5)"
    )


def run(options: argparse.Namespace) -> int:
    """Record the group and write the trace; returns the exit status."""
    from arpc.console import trace  # slow: imports torch

    return trace.run(options)
