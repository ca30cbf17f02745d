"""Runs a soak: starts the workers, injects faults, stops the load, and collects the state that is left."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import suppress
from typing import Final

import arpc
from arpc.bench.memory import resident_bytes
from scripts.soak.faults import Faults
from scripts.soak.findings import Findings
from scripts.soak.network import Network
from scripts.soak.operations.base import HANG_S
from scripts.soak.remains import remains
from scripts.soak.workers import WorkerProcess, leave, present, stop_load

__all__ = ["Runner"]

_SETTLE_S: Final = 40.0
_SAMPLE_S: Final = 1.0
_WATCH_S: Final = 0.2
_FAULTS_IN_A_ROW: Final = 8
"""After so many faults there are none for a while: errors of that time have no excuse, and latencies count."""


class Runner:
    """One soak. It is a worker of the group itself, and calls the others to stop their load."""

    def __init__(
        self, workers: list[WorkerProcess], visitors: WorkerProcess | None, network: Network | None, seed: int
    ) -> None:
        self.findings = Findings()
        self._workers = {worker.name: worker for worker in workers}
        self._visitors = visitors
        self._faults = Faults(workers, network, seed, self.findings)

    async def run(self, me: arpc.Worker, seconds: float, calm_s: float) -> None:
        """Run the whole soak. ``calm_s``: the time between two faults, on average."""
        for worker in self._workers.values():
            worker.start()
        if self._visitors is not None:
            self._visitors.start()
        async with asyncio.TaskGroup() as group:
            sampling = group.create_task(self._sample_memory())
            watching = [group.create_task(self._watch(worker)) for worker in self._workers.values()]
            try:
                await self._all_answer(me)
                await self._inject_faults(seconds, calm_s)
                await self._all_answer(me)
                await self._end_visitors()
                sampling.cancel()
                await self._settle(me)
            finally:
                for task in [sampling, *watching]:
                    task.cancel()
        await self._end_all(me)

    async def _inject_faults(self, seconds: float, calm_s: float) -> None:
        end = time.monotonic() + seconds
        number = 0
        while time.monotonic() < end:
            await self._faults.pause(calm_s)
            await self._faults.inject()
            number += 1
            if number % _FAULTS_IN_A_ROW == 0:
                await self._faults.recover()

    async def _all_answer(self, me: arpc.Worker) -> None:
        """Wait until every worker replies."""
        for name in self._workers:
            deadline = time.monotonic() + _SETTLE_S
            while True:
                try:
                    await me.rpc_sync(name, present, timeout=10)
                    break
                except (arpc.ArpcError, OSError) as error:
                    if time.monotonic() > deadline:
                        self.findings.failures.append(f"{name} did not answer within {_SETTLE_S:.0f} s: {error!r}")
                        break
                    await asyncio.sleep(0.2)

    # -- watching

    async def _sample_memory(self) -> None:
        while True:
            for worker in self._workers.values():
                if worker.is_alive:
                    samples = self.findings.memory.setdefault(worker.label, [])
                    with suppress(OSError, LookupError):  # the process may have ended just now
                        samples.append((time.monotonic(), resident_bytes(worker.pid)))
            await asyncio.sleep(_SAMPLE_S)

    async def _watch(self, worker: WorkerProcess) -> None:
        """Record a worker that has ended without a fault as crashed, and start it again."""
        alive_at = time.monotonic()
        while True:
            await asyncio.sleep(_WATCH_S)
            if worker.name in self._faults.under_way or worker.is_alive:
                alive_at = time.monotonic()
                continue
            self.findings.crashes.append((worker.label, worker.exit_code))
            self.findings.unfinished.add(worker.label)
            with self._faults.window(worker, alive_at):
                await self._faults.restart(worker)

    # -- shutdown

    async def _end_visitors(self) -> None:
        if self._visitors is not None:
            self._visitors.signal(signal.SIGTERM)
            await self._visitors.end("SIGTERM")

    async def _settle(self, me: arpc.Worker) -> None:
        """Stop the load, and wait until no state is left of it, for `_SETTLE_S` at most."""
        await asyncio.gather(*(self._stop_load(me, name) for name in self._workers))
        deadline = time.monotonic() + _SETTLE_S
        while True:
            for name in self._workers:
                try:
                    found = await me.rpc_sync(name, remains, timeout=10)
                except (arpc.ArpcError, OSError) as error:
                    found = {"left": {"no answer": repr(error)}, "tables": {}}
                self.findings.left[name], self.findings.tables[name] = found["left"], found["tables"]
            if not any(self.findings.left.values()) or time.monotonic() > deadline:
                return
            await asyncio.sleep(0.25)

    async def _stop_load(self, me: arpc.Worker, name: str) -> None:
        try:
            await me.rpc_sync(name, stop_load, timeout=2 * HANG_S)
        except (arpc.ArpcError, OSError) as error:
            self.findings.failures.append(f"the load of {name} did not stop: {error!r}")

    async def _end_all(self, me: arpc.Worker) -> None:
        for worker in self._workers.values():
            try:
                await me.rpc_sync(worker.name, leave, timeout=10)
            except (arpc.ArpcError, OSError) as error:
                self.findings.failures.append(f"{worker.name} could not be told to leave: {error!r}")
        await asyncio.gather(*(worker.end("leave") for worker in self._workers.values()))

    async def kill_all(self) -> None:
        """Kill every process that is left, and record the ends of the others."""
        everyone = [*self._workers.values(), *([self._visitors] if self._visitors is not None else [])]
        for worker in everyone:
            await worker.kill()
            self.findings.killed_at |= worker.killed_at
            self.findings.unfinished |= set(worker.killed_at)
            self.findings.terminated |= worker.terminated
            self.findings.codes += [(worker.name, how, code) for how, code in worker.codes]
