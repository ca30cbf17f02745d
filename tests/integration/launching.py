"""Functions that tests launch: they run in processes of their own, and are found there by name."""

from __future__ import annotations

import arpc

__all__ = ["greet", "main_of_each"]


async def greet(greeting: str) -> str:
    return f"{greeting} from {arpc.get_worker_info().name}"


async def main_of_each(greeting: str) -> list[str]:
    """Each worker greets, and is greeted by, all."""
    async with arpc.init_rpc():
        return [await arpc.rpc_sync(info, greet, args=(greeting,)) for info in arpc.get_worker_infos()]
