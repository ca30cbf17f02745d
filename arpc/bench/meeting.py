"""The rendezvous of caller and callee: the callee writes its address to a file in their common directory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

__all__ = ["leave_address", "read_address"]

POLL_S: Final = 0.01


def leave_address(place: Path, address: str, name: str = "address") -> None:
    """Write an address for `read_address` in another process, atomically."""
    new = place / f"{name}.new"
    new.write_text(address)
    new.rename(place / name)


async def read_address(place: Path, name: str = "address") -> str:
    """Wait until the other process has written its address, and return it."""
    path = place / name
    while not path.exists():  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(POLL_S)
    return path.read_text()
