"""``arpc bench``."""

from __future__ import annotations

import argparse
from pathlib import Path

from arpc.bench.systems import DEFAULT_ROUNDS, QUICK_ROUNDS, REGISTRY

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument(
        "--rows", default="", help="only rows whose key contains one of these (separated by commas; * as in a shell)"
    )
    parser.add_argument(
        "--systems", default="", help=f"only these (separated by commas), of: {', '.join(REGISTRY)}; or a prefix"
    )
    parser.add_argument("--rounds", type=int, help=f"{DEFAULT_ROUNDS}, or {QUICK_ROUNDS} with --quick")
    parser.add_argument("--quick", action="store_true", help="take about a minute: few and short rounds, fewer rows")
    parser.add_argument("--long", action="store_true", help="include the rows that take minutes")
    parser.add_argument("--targets", action="store_true", help="compare each target with its measurement: pass or miss")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of every round to FILE")
    parser.add_argument("--plot", type=Path, metavar="DIRECTORY", help="draw plots into DIRECTORY; needs matplotlib")
    parser.add_argument(
        "--replot",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measure nothing; draw the figures of earlier runs in FILEs",
    )
    parser.add_argument("--list", action="store_true", help="print the keys of the rows and stop")


def run(options: argparse.Namespace) -> int:
    """Measure, report and draw; returns the exit status."""
    from arpc.bench import command  # slow: imports torch

    return command.run(options)
