"""Shared memory that takes nothing, for tests of what waits for it."""

from __future__ import annotations

from typing import Any

from arpc.transport.bulk import BulkSend

__all__ = ["BusySharedMemory"]


class BusySharedMemory:
    """Carries nothing, and has enough to do until it is said to have caught up: nothing large may begin."""

    def __init__(self, connection: Any) -> None:
        self.is_behind = True
        self.unread_bytes = 0
        self._connection = connection
        connection.shared_memory = self

    def carry(self, data: bytes, bulk: BulkSend) -> bool:
        return False

    def opened(self) -> None:
        raise AssertionError

    def closing(self) -> None:
        pass

    def closed(self) -> None:
        pass

    def catch_up(self) -> None:
        self.is_behind = False
        self._connection.notify_drained()
