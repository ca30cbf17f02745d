"""``arpc certs``."""

from __future__ import annotations

import argparse

from arpc import certs

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("directory", help="the directory of the files")
    parser.add_argument("names", nargs="+", metavar="name", help="a worker's name; with * it stands for several")
    parser.add_argument("--days", type=float, default=certs.VALID_DAYS, help="how long they are valid (%(default)s)")


run = certs.run
