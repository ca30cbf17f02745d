"""A script as users write them: its functions are those of ``__main__``, in two processes that call each other.

``first_main.py plain <rank> <init method> <results>``, ``first_main.py spawn <init method> <results>``, or with
torchrun ``first_main.py torchrun <results>``. Each worker writes what it found to ``<results>/<rank>.json``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

import arpc

own_name = "nobody"
bumps = 0


class Odd(Exception):  # noqa: N818 - a user's
    pass


class Box:
    def __init__(self, content: Any) -> None:
        self.content = content

    def describe(self) -> str:
        return f"{self.content} on {own_name}"


def who() -> str:
    return own_name


async def who_async() -> str:
    return own_name


def bump() -> int:
    global bumps  # noqa: PLW0603 - what the test is about
    bumps += 1
    return bumps


def fail(text: str) -> None:
    raise Odd(text)


def apply(function: Any, *args: Any) -> Any:
    return function(*args)


def adder(number: int) -> Any:
    def add(other: Any) -> Any:
        return number + other

    return add


async def look(peer: str) -> dict[str, Any]:
    """What comes of calling the peer in all these ways."""
    box = await arpc.rpc_sync(peer, Box, args=("made there",))
    try:
        await arpc.rpc_sync(peer, fail, args=("on purpose",))
    except Odd as error:
        raised = type(error) is Odd and str(error)
    return {
        "own name": own_name,
        "plain": await arpc.rpc_sync(peer, who),
        "async": await arpc.rpc_sync(peer, who_async),
        "bumps": [await arpc.rpc_sync(peer, bump) for _ in range(2)],
        "class is ours": type(box) is Box,
        "method": await arpc.rpc_sync(peer, Box("sent").describe),
        "exception": raised,
        "as an argument": await arpc.rpc_sync(peer, apply, args=(who,)),
        "lambda": await arpc.rpc_sync(peer, lambda value: value * 2, args=(21,)),
        "closure": (await arpc.rpc_sync(peer, adder(1), args=(torch.ones(2),))).tolist(),
    }


async def work(name: str, rank: int | None, results: str, **where: Any) -> None:
    global own_name  # noqa: PLW0603 - what the test is about
    own_name = name
    async with arpc.init_rpc(name, rank=rank, options=arpc.RpcOptions(gc_freeze=False), **where) as worker:
        found = await look(f"worker{1 - worker.id}")
    found["own bumps"] = bumps
    Path(results, f"{worker.id}.json").write_text(json.dumps(found))


def spawned(rank: int, init_method: str, results: str) -> None:
    asyncio.run(work(f"worker{rank}", rank, results, world_size=2, init_method=init_method))


def main(mode: str, *arguments: str) -> None:
    if mode == "plain":
        rank, init_method, results = arguments
        arpc.run(work(f"worker{rank}", int(rank), results, world_size=2, init_method=init_method))
    elif mode == "spawn":
        torch.multiprocessing.spawn(spawned, arguments, nprocs=2)
    elif mode == "torchrun":
        arpc.run(work(f"worker{os.environ['RANK']}", None, *arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
