"""Helpers of the checks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from arpc.testing.endpoints import Endpoints
from arpc.transport.contract import Transport

__all__ = ["KIB", "MIB", "Checks", "pattern", "raises", "turns"]

KIB: Final = 1 << 10
MIB: Final = 1 << 20


class Checks:
    """A set of checks. ``make`` gives a new transport, ``address`` lets it choose where to listen."""

    def __init__(self, make: Callable[[], Transport], address: str) -> None:
        self._make = make
        self._address = address

    def endpoints(self, secret: bytes | None = None) -> Endpoints:
        """Make a listener of a new transport, and the ends that connect to it."""
        return Endpoints(self._make(), self._address, secret=secret)


def pattern(size_bytes: int, seed: int = 1) -> memoryview:
    """Return bytes in which a shift by any number of them is visible."""
    period = bytes((seed * 31 + index * index) % 251 for index in range(251))
    return memoryview(period * (size_bytes // 251 + 1))[:size_bytes]


async def turns(count: int) -> None:
    """Let the loop run that many turns."""
    for _ in range(count):
        await asyncio.sleep(0)


async def raises(kind: type[BaseException], awaitable: Awaitable[object], text: str = "") -> None:
    """Fail unless the error is raised and contains the text."""
    error: BaseException | None = None
    try:
        await awaitable
    except kind as raised:  # any other error propagates
        error = raised
    assert error is not None, f"{kind.__name__} was not raised"
    assert text in str(error), f"{error!r} does not say {text!r}"
