"""Starts the workers, does things to them as the dice say, and looks at what is left in the end."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import arpc
from arpc.bench.memory import resident_bytes
from arpc.runtime import current
from scripts.soak import load
from scripts.soak.network import Network
from scripts.soak.workers import OPTIONS, WorkerProcess, leave, stop_load

__all__ = ["Director", "Findings"]

RECOVERY_S: Final = OPTIONS.heartbeat_timeout + OPTIONS.connect_timeout + OPTIONS.rref_grace + 4.0
"""How long after a fault errors may be its consequence."""
_SETTLE_S: Final = 40.0
_SAMPLE_S: Final = 2.0


@dataclass
class Findings:
    """What the trial has shown, besides the books."""

    faults: Counter[str] = field(default_factory=Counter)
    windows: list[tuple[float, float]] = field(default_factory=list)
    """From when to when a fault was at work."""
    left: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What workers still had in the end, by name."""
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """Resident bytes of each start of a worker, over time."""
    codes: list[tuple[str, str, int]] = field(default_factory=list)
    """How processes ended that were not killed: name, what was done to them, exit code."""
    killed: set[str] = field(default_factory=set)

    def explains(self, begin: float, end: float) -> bool:
        """Whether a fault was at work while a call was."""
        return any(begin <= to + RECOVERY_S and end >= since for since, to in self.windows)


class Director:
    """One trial. It is a worker of the group itself, and tells the others when it is over by calling them."""

    def __init__(self, workers: list[WorkerProcess], network: Network | None, seed: int) -> None:
        self.findings = Findings()
        self._workers = {worker.name: worker for worker in workers}
        self._network = network
        self._dice = random.Random(seed)
        self._busy: set[str] = set()

    async def run(self, me: arpc.Worker, seconds: float, calm_s: float) -> None:
        """The whole trial. ``calm_s``: how long nothing is done between two faults, on average."""
        for worker in self._workers.values():
            worker.start()
        async with asyncio.TaskGroup() as group:
            sampling = group.create_task(self._sample_memory())
            await self._all_there(me)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                await asyncio.sleep(self._dice.uniform(0.5, 1.5) * calm_s)
                await self._inject()
            await self._all_there(me)
            await self._settle(me)
            sampling.cancel()
        await self._end_all(me)

    async def _all_there(self, me: arpc.Worker) -> None:
        """Wait until every worker answers."""
        for name in self._workers:
            deadline = time.monotonic() + _SETTLE_S
            while True:
                try:
                    await me.rpc_sync(name, load.status, timeout=10)
                    break
                except (arpc.ArpcError, OSError) as error:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"worker {name!r} did not come within {_SETTLE_S} s") from error
                    await asyncio.sleep(0.2)

    # -- faults

    async def _inject(self) -> None:
        faults: list[Callable[[WorkerProcess], Awaitable[None]]] = [
            self._kill_and_restart,
            self._kill_and_restart,
            self._stop,
            self._stop,
            self._terminate,
            self._leave,
        ]
        victims = list(self._workers.values())
        # the first lives through all of it: its memory shows whether anything grows
        mortal = victims[1:]
        fault = self._dice.choice([*faults, *([self._cut] * 3 if self._network else [])])
        if fault == self._cut:
            victims = [worker for worker in victims if worker.plan.namespace is not None]
        elif fault != self._stop:
            victims = mortal
        begin = time.monotonic()
        chosen = self._dice.sample(victims, 2 if len(victims) > 2 and self._dice.random() < 0.15 else 1)
        await asyncio.gather(*(fault(victim) for victim in chosen))
        self.findings.windows.append((begin, time.monotonic()))

    async def _kill_and_restart(self, victim: WorkerProcess) -> None:
        self.findings.faults["killed (SIGKILL) and restarted"] += 1
        await victim.kill()
        await self._restart(victim)

    async def _terminate(self, victim: WorkerProcess) -> None:
        self.findings.faults["told to end (SIGTERM) and restarted"] += 1
        victim.signal(signal.SIGTERM)
        await victim.end("SIGTERM")
        await self._restart(victim)

    async def _leave(self, victim: WorkerProcess) -> None:
        try:
            await current().rpc_sync(victim.name, leave, timeout=10)
        except (arpc.ArpcError, OSError):
            return  # it is still about to start
        self.findings.faults["left under load and came back"] += 1
        await victim.end("leave")
        await self._restart(victim)

    async def _restart(self, victim: WorkerProcess) -> None:
        await asyncio.sleep(self._dice.choice((0.0, 0.0, 0.5, 3.0)))
        victim.start()
        # until it has joined; what comes after is no fault any more
        await asyncio.sleep(1.0)

    async def _stop(self, victim: WorkerProcess) -> None:
        seconds = self._dice.choice((0.3, 1.0, 2.5, 4.0, 8.0))
        is_long = seconds > OPTIONS.heartbeat_timeout
        self.findings.faults[f"stopped (SIGSTOP) {'longer' if is_long else 'shorter'} than the heartbeat time"] += 1
        victim.signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        victim.signal(signal.SIGCONT)

    async def _cut(self, victim: WorkerProcess) -> None:
        assert self._network is not None
        seconds = self._dice.choice((0.3, 1.0, 2.5, 5.0, 8.0))
        is_long = seconds > OPTIONS.heartbeat_timeout
        self.findings.faults[f"cut off {'longer' if is_long else 'shorter'} than the heartbeat time"] += 1
        await asyncio.to_thread(self._network.cut, victim.name)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(self._network.heal, victim.name)

    # -- the end

    async def _sample_memory(self) -> None:
        while True:
            for worker in self._workers.values():
                if worker.is_alive:
                    samples = self.findings.memory.setdefault(f"{worker.name}.{worker.starts}", [])
                    with suppress(OSError, LookupError):  # it may have ended just now
                        samples.append((time.monotonic(), resident_bytes(worker.pid)))
            await asyncio.sleep(_SAMPLE_S)

    async def _settle(self, me: arpc.Worker) -> None:
        """Stop the load, and wait until nothing is left of it, or what is left stays."""
        await asyncio.gather(*(me.rpc_sync(name, stop_load, timeout=_SETTLE_S) for name in self._workers))
        deadline = time.monotonic() + _SETTLE_S
        while True:
            for name in self._workers:
                self.findings.left[name] = _what_is_left(await me.rpc_sync(name, load.status, timeout=10))
            if not any(self.findings.left.values()) or time.monotonic() > deadline:
                return
            await asyncio.sleep(0.25)

    async def _end_all(self, me: arpc.Worker) -> None:
        for worker in self._workers.values():
            await me.rpc_sync(worker.name, leave, timeout=10)
        await asyncio.gather(*(worker.end("leave") for worker in self._workers.values()))
        for worker in self._workers.values():
            self.findings.killed |= worker.killed
            self.findings.codes += [(worker.name, how, code) for how, code in worker.codes]

    async def kill_all(self) -> None:
        """Whatever went wrong: no process outlives the trial."""
        for worker in self._workers.values():
            await worker.kill()


def _what_is_left(status: dict[str, Any]) -> dict[str, Any]:
    """What should not be there any more, of what a worker has."""
    memory = status.pop("shared_memory")
    status["calls"] = {name: calls for name, calls in status["calls"].items() if calls}
    status["lent_bytes"] = {name: size for name, size in memory.get("lent_bytes", {}).items() if size}
    status["shared_blocks"] = memory.get("shared_blocks", 0)
    return {what: value for what, value in status.items() if value}
