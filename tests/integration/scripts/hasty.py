"""A worker that ends without shutting down: ``hasty.py exit`` or ``hasty.py raise``, then the init method."""

from __future__ import annotations

import asyncio
import sys

import arpc


async def main(how: str, init_method: str) -> None:
    worker = await arpc.init_rpc("hasty", rank=0, world_size=1, init_method=init_method)
    print(*worker.statistics()["connector"]["listening"], flush=True)  # noqa: T201
    if how == "exit":
        sys.exit(3)
    raise RuntimeError("enough")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
