"""The arguments that commands take which attach to a running group."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_attach_arguments"]


def add_attach_arguments(parser: argparse.ArgumentParser) -> None:
    """Which group, and what proves that one may look."""
    parser.add_argument(
        "--address",
        help="the address of any worker of the group: unix:///path, tcp://host:port, or http://host:port of its "
        "dashboard (default: the newest worker of this user on this host)",
    )
    parser.add_argument("--worker", help="look for a worker of this name on this host")
    parser.add_argument("--pid", type=int, help="look for the worker of this process")
    parser.add_argument(
        "--secret-file",
        type=Path,
        help="the group's secret (default: ARPC_SECRET, ARPC_SECRET_FILE, or the launcher's)",
    )
