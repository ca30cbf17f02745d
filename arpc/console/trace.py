"""``arpc trace``: record a whole group for some seconds, in one file."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from arpc.console.attachment import attach
from arpc.console.numbers import bytes_
from arpc.errors import ArpcError

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Record the group, and write the file; return the exit status."""
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
