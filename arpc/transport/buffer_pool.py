"""Memory for large tensors that are read from a socket, reused while its pages are warm.

The kernel takes longer to find and clear fresh pages than to read a tensor into them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from arpc.transport.release_queue import Lease, ReleaseQueue
from arpc.wire.values.raw_memory import address_of, allocate, view_of

__all__ = ["BufferPool"]

_FROM_BYTES: Final = 1 << 20
"""The size from which buffers are pooled: the C library keeps smaller ones warm itself."""
_IDLE_S: Final = 10.0


class BufferPool:
    """Keeps up to ``idle_bytes`` of unused memory, for ten seconds. Belongs to the loop."""

    def __init__(self, idle_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit = idle_bytes
        self._idle_bytes = 0
        # By size, each with the time since which it is unused; the end of a list was used last
        self._free: dict[int, deque[tuple[float, memoryview]]] = {}
        self._released: ReleaseQueue[memoryview] = ReleaseQueue(self._loop, self._collect)
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.reuses = 0

    def allocate(self, size_bytes: int) -> memoryview:
        """Return aligned memory of this size. Raises `MemoryError`."""
        # Untouched memory takes no pages, so the buffer may be larger than needed
        memory_bytes = 1 << (size_bytes - 1).bit_length()
        if size_bytes < _FROM_BYTES or memory_bytes > self._limit or self._is_closed:
            return allocate(size_bytes)
        self._collect()
        free = self._free.get(memory_bytes)
        if free:
            _, memory = free.pop()
            self._idle_bytes -= memory_bytes
            self.reuses += 1
        else:
            memory = allocate(memory_bytes)
        return view_of(Lease(self._released, memory), address_of(memory), size_bytes)

    def _collect(self) -> None:
        """Keep the released memory, as far as there is room for it."""
        now = self._loop.time()
        for memory in self._released.take():
            if self._idle_bytes + memory.nbytes > self._limit:
                continue
            self._free.setdefault(memory.nbytes, deque()).append((now, memory))
            self._idle_bytes += memory.nbytes
            if self._timer is None:
                self._timer = self._loop.call_later(_IDLE_S, self._forget_idle)

    def _forget_idle(self) -> None:
        self._timer = None
        idle_since = self._loop.time() - _IDLE_S
        for free in self._free.values():
            while free and free[0][0] <= idle_since:
                self._idle_bytes -= free.popleft()[1].nbytes
        if self._idle_bytes:
            self._timer = self._loop.call_later(_IDLE_S, self._forget_idle)

    def close(self) -> None:
        """Free the idle memory, and keep none from now on. Memory in use is freed when its use ends."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._free.clear()
        self._released.close()
        self._idle_bytes = 0

    def statistics(self) -> dict[str, int]:
        return {"idle_bytes": self._idle_bytes, "reuses": self.reuses}
