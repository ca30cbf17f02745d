"""Futures that functions marked with `async_execution` return: of asyncio, of torch, or of `concurrent.futures`."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any

import torch

from arpc.user_errors import is_a, type_name_of

__all__ = ["await_future"]


async def await_future(future: Any, name: str) -> Any:
    """The value of a future that a function of that name has returned. Raises `TypeError` for what is no future.

    The future goes on if the code that awaits it is cancelled: others may wait for it, too.
    """
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def settle(_: object) -> None:
        if not done.done():
            done.set_result(None)

    if is_a(future, asyncio.Future):
        future.add_done_callback(settle)
    elif is_a(future, (torch._C.Future, concurrent.futures.Future)):
        # it is completed on a thread of its own
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(settle, None))
    else:
        raise TypeError(
            f"a function marked with async_execution must return a Future, and {name} returned {type_name_of(future)}"
        )
    await done
    return future.result() if hasattr(future, "result") else future.value()
