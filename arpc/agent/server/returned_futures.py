"""Futures that functions marked with `async_execution` return: of asyncio, of torch, or of `concurrent.futures`."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any

import torch

from arpc.user_errors import is_a, type_name_of

__all__ = ["await_future"]


async def await_future(future: Any, name: str) -> Any:
    """Return the value of a future that the function ``name`` has returned. Raises `TypeError` if it is no future.

    The future is not cancelled with the code that awaits it, because other code may wait for it, too.
    """
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def settle(_: object) -> None:
        if not done.done():
            done.set_result(None)

    if is_a(future, asyncio.Future):
        future.add_done_callback(settle)
    elif is_a(future, (torch._C.Future, concurrent.futures.Future)):
        # it may be completed on another thread
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(settle, None))
    else:
        raise TypeError(
            f"a function marked with async_execution must return a Future, and {name} returned {type_name_of(future)}"
        )
    await done
    return future.result() if hasattr(future, "result") else future.value()
