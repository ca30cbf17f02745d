"""Shared code of all operations: the worker of this process, its event log, and a time limit for every call."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import arpc
from arpc.runtime import current
from scripts.soak.ledger import HungCallError, Ledger

__all__ = ["HANG_S", "TIMEOUT_S", "Client", "DeliberateError", "Operation", "here", "raises", "set_client"]

TIMEOUT_S: Final = 12.0
"""The timeout of most calls."""
HANG_S: Final = 30.0
"""Seconds after which a call hangs: more than the timeout, and than the longest fault with its recovery."""
_HANG_STEP_S: Final = 3.0
"""The difference between the limits of a call and of the call around it, so that the innermost is reported."""


class DeliberateError(Exception):
    """Raised by functions of the soak because their caller asked for it."""


class Client:
    """Makes the calls of one process, and logs them. Its handlers use it for calls of their own."""

    def __init__(self, ledger: Ledger, seed: str) -> None:
        self.ledger = ledger
        self.random = random.Random(seed)
        self.others: set[str] = set()
        """The names that may be called: all members, and those that were lost."""
        self.children: set[asyncio.Task[Any]] = set()
        """Tasks that each wait for a process that a handler forked."""

    @property
    def worker(self) -> arpc.Worker:
        """The worker of the calling task or handler."""
        return current()

    def other(self) -> str:
        """Choose the name of another worker."""
        return self.random.choice(sorted(self.others))

    def path(self, length: int) -> list[str]:
        """Choose a path of workers for a chain of calls. No worker follows itself; this worker may be among them."""
        names = sorted({*self.others, self.worker.name})
        made = [self.other()]
        while len(made) < length:
            made.append(self.random.choice([name for name in names if name != made[-1]]))
        return made

    @asynccontextmanager
    async def call(self, kind: str, to: str, *others: str, depth: int = 0) -> AsyncIterator[str]:
        """Log a call inside of the block: yield its token, and end a call that hangs with `HungCallError`.

        ``others`` are workers besides caller and callee that the call depends on. ``depth``: how many handlers are
        around it.
        """
        token = self.ledger.begin(kind, to, others)
        limit = asyncio.timeout(HANG_S - _HANG_STEP_S * depth)
        try:
            async with limit:
                yield token
        except BaseException as error:
            if limit.expired():
                hung = HungCallError(f"call {token} ({kind} to {to}) did not end")
                self.ledger.end(token, hung)
                raise hung from error
            self.ledger.end(token, error)
            raise
        self.ledger.end(token, None)

    def log_end(self, token: str, future: asyncio.Future[Any]) -> None:
        """Log the end of a call that no task awaits: its done callback."""
        self.ledger.end(token, asyncio.CancelledError() if future.cancelled() else future.exception())


@dataclass(frozen=True)
class Operation:
    """One kind of load: tasks of every worker run it again and again."""

    name: str
    run: Callable[[Client], Awaitable[None]]
    pause_s: float = 0.1
    """Seconds that a task waits on average before it runs it again."""


_client: list[Client] = []


def set_client(client: Client) -> None:
    """Make a client the one that handlers of this process use."""
    _client[:] = [client]


def here() -> Client:
    """Return the client of this process."""
    return _client[0]


_NO_ANSWERS: Final = (arpc.CallError, arpc.RRefError, arpc.ShutdownError, arpc.UnknownWorkerError)
"""Errors of calls whose function may not have run at all."""


async def raises(call: Awaitable[Any], *expected: type[Exception]) -> None:
    """Wait for a call that has to end with one of these errors. Errors of lost workers and timeouts pass through."""
    try:
        result = await call
    except _NO_ANSWERS:
        raise
    except expected:
        return
    raise AssertionError(f"{result!r} came instead of {' or '.join(error.__name__ for error in expected)}")
