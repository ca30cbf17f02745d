"""What a peer knows of the connections that threads of this worker have to it for calls of their own.

The drop-in makes them, see `arpc.compat.blocking_client`. The peer counts their calls among its own, and ends them when
its connection ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from arpc.transport.connection import Connection

__all__ = ["CountsBytes", "ThreadConnections"]

MakeError = Callable[[str], Exception]
"""The error of a call that was under way when its connection ended, by the name of the function."""


class CountsBytes(Protocol):
    """A connection, as far as it is counted."""

    bytes_received: int

    def count_sent(self) -> int:
        """Bytes sent until now."""


class ThreadConnections(Protocol):
    """Those to one peer."""

    @property
    def calls_made(self) -> int:
        """How many calls there have been."""

    def calls(self) -> list[tuple[int, str, float | None]]:
        """The calls under way: id, name of the function, seconds left if these are limited."""

    @property
    def all(self) -> Collection[CountsBytes]: ...

    def lost(self, main: Connection, make_error: MakeError, /) -> None:
        """End all that belong to a connection between both workers, which has ended, and their calls with an error."""

    async def aclose(self, make_error: MakeError, /) -> None:
        """End all of them, for good."""
