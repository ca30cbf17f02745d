"""The two processes of one system, as the main process sees them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from arpc.bench.nursery import Nursery, Offspring
from arpc.bench.placement import Placement, place
from arpc.bench.processes import family, kill_family
from arpc.bench.systems import REGISTRY, Measurement

__all__ = ["MeasurementFailedError", "Pair"]

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
LOG_TAIL_LINES = 12


class MeasurementFailedError(Exception):
    """A process did not start, ended, hung or reported an error; the text has the end of its log."""


class Pair:
    """Starts, measures and stops the caller and the callee of one system. Use one `Pair` from one task at a time."""

    def __init__(self, system: str, nursery: Nursery) -> None:
        self.system = system
        self._nursery = nursery
        self._spins = REGISTRY[system].spins_when_idle
        self._directory: Path | None = None
        self._processes: dict[str, Offspring] = {}

    @property
    def running(self) -> bool:
        return bool(self._processes) and all(one.returncode is None for one in self._processes.values())

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes.values())

    async def start(self) -> None:
        """Start both sides, and wait until they are ready."""
        self._directory = Path(tempfile.mkdtemp(prefix=f"bench-{self.system}-"))
        try:
            for role in ("callee", "caller"):
                self._processes[role] = await self._spawn(role, self._directory)
            async with asyncio.timeout(START_TIMEOUT_S):
                for role in ("callee", "caller"):
                    await self._hear(role)
        except TimeoutError:
            text = f"{self.system} was not ready after {START_TIMEOUT_S:.0f} s{self._log_tail()}"
            await self.kill()
            raise MeasurementFailedError(text) from None
        except BaseException:
            await self.kill()
            raise
        self._freeze()

    async def measure(
        self, name: str, settings: dict[str, str | int | float], placement: Placement, timeout_s: float
    ) -> Measurement:
        """Run one measurement. A pair whose measurement failed is killed; `start` makes a new one."""
        caller, callee = self._processes["caller"], self._processes["callee"]
        if "callee_pid" in settings:
            settings = settings | {"callee_pid": callee.pid}
        try:
            self._thaw()
            place(placement, caller_pid=caller.pid, callee_pid=callee.pid)
            async with asyncio.timeout(timeout_s):
                await self._say("caller", {"measure": name, "settings": settings})
                answer = await self._hear("caller")
        except TimeoutError:
            text = f"{self.system}: {name} took longer than {timeout_s:.0f} s{self._log_tail()}"
            await self.kill()
            raise MeasurementFailedError(text) from None
        except (OSError, MeasurementFailedError) as error:
            await self.kill()
            raise MeasurementFailedError(str(error)) from error
        if "error" in answer:
            await self.kill()
            raise MeasurementFailedError(f"{self.system}: {name} failed\n{answer['error']}")
        self._freeze()
        figures: Measurement = answer["figures"]
        return figures

    async def stop(self) -> None:
        """Let both sides shut down together; kill a process that has not ended in time."""
        self._thaw()
        for process in self._processes.values():
            if process.returncode is None:
                process.writer.write_eof()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                for process in self._processes.values():
                    await process.wait()
        except TimeoutError:
            pass
        finally:
            await self.kill()

    async def kill(self) -> None:
        """Kill both sides, with all processes that they have started."""
        alive = [process.pid for process in self._processes.values() if process.returncode is None]
        kill_family(alive, sessions=self.pids)
        for process in self._processes.values():
            await process.wait()
        self._processes.clear()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    async def _spawn(self, role: str, directory: Path) -> Offspring:
        configuration = REGISTRY[self.system]
        with (directory / f"{role}.log").open("wb") as log:
            process = await self._nursery.start(
                "arpc.bench.serve",
                (self.system, role, str(directory)),
                configuration.environment,
                log,
                fork=configuration.forks,
            )
        if process.problem:
            raise MeasurementFailedError(f"the {role} of {self.system} did not start: {process.problem}")
        return process

    async def _say(self, role: str, message: dict[str, Any]) -> None:
        writer = self._processes[role].writer
        writer.write(json.dumps(message).encode() + b"\n")
        await writer.drain()

    async def _hear(self, role: str) -> dict[str, Any]:
        line = await self._processes[role].reader.readline()
        if not line:
            raise MeasurementFailedError(f"the {role} of {self.system} ended{self._log_tail()}")
        message: dict[str, Any] = json.loads(line)
        return message

    def _freeze(self) -> None:
        if self._spins:
            self._signal(signal.SIGSTOP)

    def _thaw(self) -> None:
        if self._spins:
            self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        # With all processes that they have started: the further callees of a group are children of the first one
        for pid in family(process.pid for process in self._processes.values() if process.returncode is None):
            with suppress(ProcessLookupError):  # it has ended since it was listed
                os.kill(pid, number)

    def _log_tail(self) -> str:
        if self._directory is None:
            return ""
        parts = []
        for role in ("callee", "caller"):
            path = self._directory / f"{role}.log"
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
            parts += [f"  {role}: {line}" for line in lines[-LOG_TAIL_LINES:]]
        return "".join("\n" + part for part in parts)
