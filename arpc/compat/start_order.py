"""The order in which `init_rpc` returns on the ranks of a group: rank 0 first."""

from __future__ import annotations

import asyncio
from contextvars import Context
from datetime import timedelta
from functools import partial
from typing import Final

from torch.distributed import Store  # type: ignore[attr-defined]

from arpc.compat.loop_thread import LoopThread
from arpc.group.membership import WorkerRecord
from arpc.log import get_logger

__all__ = ["StartOrder"]

logger = get_logger("arpc.compat")

_TIMEOUT: Final = timedelta(seconds=60)


class StartOrder:
    """Makes `init_rpc` return on rank 0 first, as in torch: programs then define there what the other ranks call."""

    def __init__(self, store: Store, first: WorkerRecord) -> None:
        self._store = store
        self._first = first
        # consecutive groups in one store have different incarnations
        self._key = f"arpc.compat/started/{first.incarnation}"

    def release(self, thread: LoopThread) -> None:
        """Let the other ranks return. Called by rank 0 as the last step before it returns itself.

        The loop sends the message: its thread runs only once this one, which goes on with the program, blocks or has
        used up its turn at the GIL.
        """
        thread.submit(Context(), partial(self._send, thread.loop))

    def _send(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.run_in_executor(None, self._set)

    def _set(self) -> None:
        try:
            self._store.set(self._key, "1")
        except RuntimeError:  # the others then report that this one did not start
            logger.exception("cannot report in the store that this worker has started")

    def wait(self) -> None:
        """Wait for rank 0. Raises RuntimeError if it does not start."""
        try:
            self._store.wait([self._key], _TIMEOUT)
        except RuntimeError as error:
            raise RuntimeError(
                f"worker {self._first.name!r} (rank 0) did not start within {_TIMEOUT.seconds} s: {error}"
            ) from error
