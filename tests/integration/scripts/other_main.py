"""Another script than first_main.py, with other functions of the same names: ``other_main.py <rank> <init method>``."""

from __future__ import annotations

import asyncio
import sys

import arpc

own_name = "other"


def who() -> str:
    return "the who() of the other script"


async def main(rank: str, init_method: str) -> None:
    async with arpc.init_rpc(f"worker{rank}", rank=int(rank), world_size=2, init_method=init_method):
        pass


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
