"""The faults that the runner injects into workers."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import arpc
from arpc.runtime import current
from scripts.soak.findings import RECOVERY_S, FaultWindow, Findings
from scripts.soak.network import Network
from scripts.soak.workers import OPTIONS, WorkerProcess, leave

__all__ = ["Faults"]

_JOIN_S: Final = 1.0
"""Seconds that a worker takes to join once it is started."""
_PAIR: Final = 0.15
"""The probability that two workers have the same fault at once."""


class _Fault(NamedTuple):
    weight: int
    inject: Callable[[WorkerProcess], Awaitable[None]]
    may_hit: Callable[[WorkerProcess], bool]


class Faults:
    """Chooses faults by a seed, injects them, and logs them in the findings."""

    def __init__(self, workers: list[WorkerProcess], network: Network | None, seed: int, findings: Findings) -> None:
        self._workers = workers
        self._network = network
        self._random = random.Random(seed)
        self._findings = findings
        self.under_way: set[str] = set()
        """The workers that have a fault now."""
        # the first worker is never ended: its memory shows whether anything grows
        first = workers[0].name
        self._faults = [
            _Fault(4, self._kill_and_restart, lambda worker: worker.name != first),
            _Fault(2, self._stop, lambda _: True),
            _Fault(1, self._terminate, lambda worker: worker.name != first),
            _Fault(1, self._leave, lambda worker: worker.name != first),
        ]
        if network is not None:
            self._faults.append(_Fault(3, self._cut, lambda worker: worker.plan.namespace is not None))

    async def pause(self, calm_s: float) -> None:
        """Wait between two faults: `calm_s` on average."""
        await asyncio.sleep(self._random.uniform(0.5, 1.5) * calm_s)

    async def inject(self) -> None:
        """Inject one of the faults into one worker or two, and wait for its end."""
        fault = self._random.choices(self._faults, [fault.weight for fault in self._faults])[0]
        victims = [worker for worker in self._workers if fault.may_hit(worker) and self._is_well(worker)]
        if not victims:
            return
        count = 2 if len(victims) > 2 and self._random.random() < _PAIR else 1
        await asyncio.gather(*(self._hit(fault, victim) for victim in self._random.sample(victims, count)))

    def _is_well(self, worker: WorkerProcess) -> bool:
        return worker.is_alive and worker.name not in self.under_way

    async def _hit(self, fault: _Fault, victim: WorkerProcess) -> None:
        with self.window(victim):
            await fault.inject(victim)

    @contextmanager
    def window(self, victim: WorkerProcess, begin: float | None = None) -> Iterator[None]:
        """Record the time of a fault, which began now or earlier: it explains errors until some time after its end."""
        begin = time.monotonic() if begin is None else begin
        self.under_way.add(victim.name)
        try:
            yield
        finally:
            self.under_way.discard(victim.name)
            self._findings.windows.append(FaultWindow(victim.name, begin, time.monotonic()))

    async def recover(self) -> None:
        """Wait until no error can be the consequence of an earlier fault, and some time more."""
        await asyncio.sleep(RECOVERY_S + 5.0)

    # -- one method for each fault

    async def _kill_and_restart(self, victim: WorkerProcess) -> None:
        self._findings.faults["killed (SIGKILL) and restarted"] += 1
        await victim.kill()
        await self.restart(victim)

    async def _terminate(self, victim: WorkerProcess) -> None:
        self._findings.faults["told to end (SIGTERM) and restarted"] += 1
        victim.signal(signal.SIGTERM)
        await victim.end("SIGTERM")
        await self.restart(victim)

    async def _leave(self, victim: WorkerProcess) -> None:
        # the other workers go on calling it
        try:
            await current().rpc_sync(victim.name, leave, timeout=10)
        except (arpc.ArpcError, OSError):
            return  # it has not joined yet
        self._findings.faults["left and came back"] += 1
        await victim.end("leave")
        await self.restart(victim)

    async def restart(self, victim: WorkerProcess) -> None:
        """Start a worker again under its name, at once or after a while."""
        await asyncio.sleep(self._random.choice((0.0, 0.0, 0.5, 3.0)))
        victim.start()
        await asyncio.sleep(_JOIN_S)

    async def _stop(self, victim: WorkerProcess) -> None:
        seconds = self._random.choice((0.3, 1.0, 2.5, 4.0, 8.0))
        self._findings.faults[f"stopped (SIGSTOP) {_compared(seconds)} than the heartbeat time"] += 1
        victim.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            victim.signal(signal.SIGCONT)

    async def _cut(self, victim: WorkerProcess) -> None:
        assert self._network is not None
        seconds = self._random.choice((0.3, 1.0, 2.5, 5.0, 8.0))
        self._findings.faults[f"cut off {_compared(seconds)} than the heartbeat time"] += 1
        await asyncio.to_thread(self._network.cut, victim.name)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(self._network.heal, victim.name)


def _compared(seconds: float) -> str:
    return "longer" if seconds > OPTIONS.heartbeat_timeout else "shorter"
