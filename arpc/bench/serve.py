"""One process of a pair: ``python -m arpc.bench.serve SYSTEM callee|caller DIRECTORY``.

It exchanges JSON lines with the main process: it sends ``{"ready": ...}``, then replies to each command to measure. It
shuts down at the end of its input.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

from arpc.bench.processes import die_with_parent
from arpc.bench.systems import Caller, GroupSystem, Measurement, System, load

__all__ = ["main"]


class Control:
    """The pipe to the main process. Output that libraries print goes to the log instead."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def say(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")

    async def hear(self) -> dict[str, Any] | None:
        """Return the next command, or None at the end of the input. The loop stays free meanwhile."""
        line = await asyncio.to_thread(sys.stdin.readline)
        return cast("dict[str, Any]", json.loads(line)) if line else None


async def serve_callee(system: System, place: Path, control: Control) -> None:
    async with system.callee(place):
        control.say({"ready": os.getpid()})
        while await control.hear() is not None:
            pass


async def serve_caller(system: System, place: Path, control: Control) -> None:
    async with system.caller(place) as caller:
        control.say({"ready": os.getpid()})
        while (command := await control.hear()) is not None:
            try:
                control.say({"figures": await measure(caller, command["measure"], command["settings"])})
            except Exception:  # noqa: BLE001 - its row reports the error, and the others go on
                control.say({"error": traceback.format_exc()})


async def measure(caller: Caller, name: str, settings: dict[str, Any]) -> Measurement:
    method = cast("Callable[..., Awaitable[Measurement]]", getattr(caller, name))
    gc.collect()  # garbage of the measurement before must not count here
    return await method(**settings)


def main(arguments: list[str]) -> None:
    """Run one side of one system until its input ends."""
    name, role, place = arguments
    die_with_parent()  # so that no process is left behind, however the main process ends
    system = load(name)
    with contextlib.ExitStack() as stack:
        if role == "callee" and isinstance(system, GroupSystem):
            stack.enter_context(system.others(Path(place)))
        control = Control()
        system.run((serve_caller if role == "caller" else serve_callee)(system, Path(place), control))


if __name__ == "__main__":
    main(sys.argv[1:])
