"""The processes of the trial: each is one worker under load, until it is told to leave, or killed."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import arpc
from scripts.soak.ledger import Ledger
from scripts.soak.load import Load, keep_books
from scripts.soak.network import enter_namespace

__all__ = ["OPTIONS", "Plan", "WorkerProcess", "leave", "stop_load"]

CONTEXT: Final = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "arpc", "scripts.soak.workers"])

OPTIONS: Final = arpc.RpcOptions(
    secret=b"of this trial",
    heartbeat_interval=0.5,
    heartbeat_timeout=3.0,
    connect_timeout=3.0,
    rref_grace=2.0,
    control_backoff=0.2,
    control_retries=8,
    rpc_timeout=15.0,
    init_timeout=60.0,
    shutdown_timeout=30.0,
)

_load: list[Load] = []
_leaving: Final = asyncio.Event()


@dataclass(frozen=True)
class Plan:
    """Where and how a worker is to run."""

    name: str
    store: str
    directory: Path
    runtime_directory: Path
    seed: int
    tasks: int
    listen: tuple[str, ...]
    namespace: str | None = None


async def stop_load() -> None:
    """Called by the director: begin nothing new, and wait until all that was begun has ended."""
    await _load[0].stop()


async def leave() -> None:
    """Called by the director: shut down in good order."""
    _leaving.set()


async def _main(plan: Plan, start: int) -> None:
    ledger = Ledger(plan.directory, plan.name, start)
    keep_books(ledger)
    options = OPTIONS.replace(listen=plan.listen)
    async with arpc.init_rpc(plan.name, world_size=None, init_method=plan.store, options=options) as worker:
        load = Load(worker, ledger, f"{plan.seed}/{plan.name}/{start}")
        _load[:] = [load]
        load.start(plan.tasks)
        try:
            await _leaving.wait()
            await load.stop()
        except asyncio.CancelledError:
            load.cancel()
            raise


def _run(plan: Plan, start: int) -> None:
    os.environ["XDG_RUNTIME_DIR"] = str(plan.runtime_directory)
    log = os.open(plan.directory / f"{plan.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(
        level=logging.INFO, format=f"%(relativeCreated)d {start} %(levelname)s %(name)s: %(message)s", force=True
    )
    if plan.namespace is not None:
        enter_namespace(plan.namespace)
    arpc.run(lambda: _main(plan, start))
    sys.stdout.flush()


class WorkerProcess:
    """One worker, over all its starts."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.starts = 0
        self.killed: set[str] = set()
        """Starts that had no chance to end their books, as ``name.start``."""
        self.codes: list[tuple[str, int]] = []
        """How starts ended that were not killed: what was done to them, and their exit codes."""
        self.started_at = 0.0
        self._process: multiprocessing.process.BaseProcess | None = None

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def pid(self) -> int:
        assert self._process is not None
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def start(self) -> None:
        assert not self.is_alive
        self.starts += 1
        self.started_at = time.monotonic()
        process = CONTEXT.Process(target=_run, args=(self.plan, self.starts), name=self.name)
        process.start()
        self._process = process

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def kill(self) -> None:
        """No chance to say goodbye."""
        if self._process is not None and self.is_alive:
            self.killed.add(f"{self.name}.{self.starts}")
            self._process.kill()
        await self.ended()

    async def ended(self, limit_s: float = 60.0) -> int | None:
        """Its exit code; None if it has not ended in time."""
        if self._process is None:
            return None
        await asyncio.to_thread(self._process.join, limit_s)
        return self._process.exitcode

    async def end(self, how: str, limit_s: float = 60.0) -> None:
        """Wait for it to end by itself, and note how it did. It is killed if it does not."""
        code = await self.ended(limit_s)
        if code is None:
            # where it hangs goes to its log
            with suppress(ProcessLookupError):
                self.signal(signal.SIGUSR1)
            await asyncio.sleep(0.5)
            await self.kill()
            code = -int(signal.SIGKILL)
        self.codes.append((how, code))
