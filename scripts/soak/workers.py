"""The processes of the soak: each is one worker under load, until the runner calls `leave` or kills it."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import arpc
from scripts.soak.ledger import Ledger
from scripts.soak.load import Load
from scripts.soak.network import enter_namespace
from scripts.soak.operations.base import Client, set_client
from scripts.soak.visitors import visit

__all__ = ["ALLOCATOR", "OPTIONS", "Plan", "WorkerProcess", "leave", "present", "stop_load"]

CONTEXT: Final = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "arpc._public", "scripts.soak.workers"])

ALLOCATOR: Final = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": str(256 << 10)}
"""Variables of glibc for the processes: freed memory is returned to the system, so that a leak is visible."""

OPTIONS: Final = arpc.RpcOptions(
    secret=b"a secret of this soak only",
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
    """The settings of a worker: where and how it runs."""

    name: str
    store: str
    directory: Path
    runtime_directory: Path
    seed: int
    tasks: int
    families: tuple[str, ...]
    listen: tuple[str, ...]
    namespace: str | None = None
    is_visitor: bool = False
    """True to run a sequence of workers, each under a new name, instead of one under load."""


async def present() -> None:
    """Called by the runner: replies once the worker has joined."""


async def stop_load() -> None:
    """Called by the runner: begin no new operation, and wait until all that were begun have ended."""
    await _load[0].stop()


async def leave() -> None:
    """Called by the runner: shut down gracefully."""
    _leaving.set()


async def _serve(plan: Plan, start: int) -> None:
    ledger = Ledger(plan.directory, plan.name, start)
    options = OPTIONS.replace(listen=plan.listen)
    # handlers need the client as soon as the worker has joined
    client = Client(ledger, f"{plan.seed}/{plan.name}/{start}")
    set_client(client)
    async with arpc.init_rpc(plan.name, world_size=None, init_method=plan.store, options=options):
        load = Load(client, plan.families)
        _load[:] = [load]
        load.start(plan.tasks)
        try:
            await _leaving.wait()
            await load.stop()
        except asyncio.CancelledError:
            load.cancel()
            raise


async def _visit(plan: Plan, start: int) -> None:
    ledger = Ledger(plan.directory, plan.name, start)
    client = Client(ledger, f"{plan.seed}/{plan.name}/{start}")
    set_client(client)
    await visit(client, plan.store, OPTIONS.replace(listen=plan.listen))


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
    main: Callable[[Plan, int], Coroutine[Any, Any, None]] = _visit if plan.is_visitor else _serve
    arpc.run(lambda: main(plan, start))
    sys.stdout.flush()


class WorkerProcess:
    """One worker, over all its starts."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.starts = 0
        self.killed_at: dict[str, float] = {}
        """The times at which starts (``name.start``) were killed: these could not log the ends of their calls."""
        self.terminated: set[str] = set()
        """Starts that received a SIGTERM."""
        self.codes: list[tuple[str, int]] = []
        """The ends of starts that were not killed: ``leave`` or ``SIGTERM``, and the exit code."""
        self._process: multiprocessing.process.BaseProcess | None = None

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def label(self) -> str:
        """The process of the latest start, as in event logs: ``name.start``."""
        return f"{self.name}.{self.starts}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.exitcode

    def start(self) -> None:
        assert not self.is_alive
        self.starts += 1
        process = CONTEXT.Process(target=_run, args=(self.plan, self.starts), name=self.name)
        process.start()
        self._process = process

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it may have crashed just now, which the runner notices
            os.kill(self.pid, number)

    async def kill(self) -> None:
        """End the process with SIGKILL."""
        if self._process is not None and self.is_alive:
            self.killed_at[self.label] = time.monotonic()
            self._process.kill()
        await self.ended()

    async def ended(self, limit_s: float = 60.0) -> int | None:
        """Wait for the end of the process; return its exit code, or None if it has not ended in time."""
        if self._process is None:
            return None
        await asyncio.to_thread(self._process.join, limit_s)
        return self._process.exitcode

    async def end(self, how: str, limit_s: float = 60.0) -> None:
        """Wait for the process to end by itself, and record its exit code. It is killed if it does not end."""
        if how == "SIGTERM":
            self.terminated.add(self.label)
        code = await self.ended(limit_s)
        if code is None:
            # the stacks of its threads go to its log
            self.signal(signal.SIGUSR1)
            await asyncio.sleep(0.5)
            await self.kill()
            code = -int(signal.SIGKILL)
        self.codes.append((how, code))
