"""What a peer knows of the connections that threads of this worker have to it for calls of their own.

They are made by the drop-in, see `arpc.compat.blocking_client`. The peer counts their calls among its own, and ends
them when its connection ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

from arpc.transport.base import Connection

__all__ = ["ThreadLine", "ThreadLines"]


class ThreadLine(Protocol):
    """One such connection."""

    call_id: int
    calling: Any
    """The function whose call is under way, or its name; None if there is none."""
    due_at: float
    """When the time of the call is up, 0 if it has no limit."""
    bytes_received: int

    def count_sent(self) -> int:
        """Bytes sent until now."""


class ThreadLines(Protocol):
    """All of them to one peer. They end with the connection that they belong to."""

    main: Connection | None

    @property
    def calls_made(self) -> int:
        """How many calls there have been."""

    @property
    def under_way(self) -> Collection[ThreadLine]:
        """Those on which a call is being made."""

    @property
    def all(self) -> Collection[ThreadLine]: ...

    @property
    def count(self) -> int: ...

    def end(self, make_error: Callable[[str], Exception], /) -> None:
        """End all of them, and calls under way with the error that is made for the name of their function."""

    async def aclose(self, make_error: Callable[[str], Exception], /) -> None:
        """End all of them, for good."""
