"""The summary of the group, made once a second for any number of viewers, and every ten seconds without viewers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Final

import msgspec

from arpc.log import get_logger
from arpc.metrics.service import MetricsService

__all__ = ["Feed"]

logger = get_logger("arpc.http")

_PERIOD_S: Final = 1.0
_PATIENCE_S: Final = 0.5
_IDLE_PERIOD_S: Final = 10.0
"""How often the group is asked without viewers, so that workers go on counting, and new workers begin to count."""
_encode = msgspec.json.Encoder().encode


class Feed:
    """One task that asks the group, and all viewers that wait for its next summary."""

    def __init__(self, metrics: MetricsService) -> None:
        self._metrics = metrics
        self._viewers = 0
        self._number = 0
        self._latest = b""
        self._changed = asyncio.Condition()
        self._wanted = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="arpc-http-feed")

    @property
    def viewers(self) -> int:
        return self._viewers

    async def current(self) -> bytes:
        """Return the current summary, as JSON."""
        return _encode(await self._metrics.summary(_PATIENCE_S))

    async def updates(self) -> AsyncIterator[bytes]:
        """Yield the current summary, and then each new one. A slow viewer misses some."""
        self._viewers += 1
        self._wanted.set()
        try:
            seen = self._number
            yield await self.current()
            while True:
                async with self._changed:
                    while self._number == seen:
                        await self._changed.wait()
                    seen, latest = self._number, self._latest
                yield latest
        finally:
            self._viewers -= 1
            if not self._viewers:
                self._wanted.clear()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                latest = await self.current()
            except Exception:
                # viewers get the next summary; an internal error must not leave them waiting forever
                logger.exception("an internal error while the group was asked")
            else:
                async with self._changed:
                    self._number += 1
                    self._latest = latest
                    self._changed.notify_all()
            if self._viewers:
                await asyncio.sleep(max(0.05, began + _PERIOD_S - loop.time()))
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_IDLE_PERIOD_S):
                        await self._wanted.wait()

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
