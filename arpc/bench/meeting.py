"""How caller and callee find each other: the callee leaves its address in their common directory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

__all__ = ["leave_address", "read_address"]

POLL_S: Final = 0.01


def leave_address(place: Path, address: str, name: str = "address") -> None:
    """For `read_address` in another process, which sees it whole or not at all."""
    new = place / f"{name}.new"
    new.write_text(address)
    new.rename(place / name)


async def read_address(place: Path, name: str = "address") -> str:
    """Waits until the other process has left it."""
    path = place / name
    while not path.exists():  # noqa: ASYNC110 - nobody in this process could tell
        await asyncio.sleep(POLL_S)
    return path.read_text()
