"""``arpc launch``."""

from __future__ import annotations

import argparse
from typing import Final

__all__ = ["add_arguments", "run"]

FILES: Final = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}
"""How shells complete what is a file."""
STRATEGIES: Final = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    how_many = parser.add_mutually_exclusive_group(required=True)
    how_many.add_argument("-n", "--workers", type=int, metavar="N", help="workers named worker0, worker1, ...")
    how_many.add_argument("--role", metavar="ROLES", help="workers by role: ps=1,trainer=3 are ps0, trainer0, ...")
    parser.add_argument("-m", "--module", action="store_true", help="PROGRAM is a module, as for python -m")
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="restart a failed group up to N times (0)"
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="with --max-restarts: restart only the worker that failed, for programs whose group is elastic",
    )
    parser.add_argument(
        "--grace", type=float, default=10.0, metavar="SECONDS", help="time that workers have to end after SIGTERM (10)"
    )
    parser.add_argument(
        "--dashboard",
        nargs="?",
        const="",
        metavar="HOST:PORT",
        help="let the worker of rank 0 serve the dashboard, at this address or at the usual port of this machine",
    )
    parser.add_argument(
        "--no-fork",
        action="store_false",
        dest="fork",
        help="start an interpreter for each worker, instead of forking them from one that has imported torch",
    )
    parser.add_argument(
        "--on", choices=("local", "ray"), default="local", help="this machine, or a Ray cluster (local)"
    )
    parser.add_argument("--resources", metavar="NEEDS", default="CPU=1", help="on Ray: what each worker needs (CPU=1)")
    parser.add_argument("--strategy", choices=STRATEGIES, default="PACK", help="on Ray: how it chooses nodes (PACK)")
    program = parser.add_argument("program", metavar="PROGRAM", help="the script that every worker runs")
    program.complete = FILES  # type: ignore[attr-defined]  # shtab looks for it there
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")


def run(options: argparse.Namespace) -> int:
    """Launch a group; returns the exit status."""
    from arpc.launch import command  # slow: imports torch

    return command.run(options)
