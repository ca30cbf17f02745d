"""``arpc trace``: what a whole group does for some seconds, in one file."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from arpc.console.attachment import add_attach_arguments, attach
from arpc.console.numbers import bytes_
from arpc.errors import ArpcError
from arpc.metrics.service import MAX_TRACE_S

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_attach_arguments(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("arpc-trace.json"),
        help="where it goes: .json for https://ui.perfetto.dev, .html for any browser (default arpc-trace.json)",
    )
    parser.add_argument(
        "-t", "--seconds", type=float, default=5.0, help=f"how long, at most {MAX_TRACE_S:g} (default 5)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Record, and write the file."""
    output: Path = arguments.output
    form = "html" if output.suffix in {".html", ".htm"} else "json"
    try:
        trace = asyncio.run(_record(arguments, form))
        output.write_bytes(trace)
    except (ArpcError, OSError) as error:
        sys.stderr.write(f"arpc trace: {error}\n")
        return 1
    where = "a browser" if form == "html" else "https://ui.perfetto.dev"
    sys.stdout.write(f"{output}: {arguments.seconds:g} s, {bytes_(len(trace))}; open it in {where}\n")
    return 0


async def _record(arguments: argparse.Namespace, form: str) -> bytes:
    async with attach(arguments) as group:
        return await group.trace(arguments.seconds, form)
