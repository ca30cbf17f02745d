"""Futures that functions marked with `async_execution` return: of asyncio, of torch, or of `concurrent.futures`."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any

import torch

from arpc.user_errors import is_a, type_name_of

__all__ = ["await_future", "value_of", "when_done"]


def when_done(future: Any, name: str, loop: asyncio.AbstractEventLoop, then: Callable[[Any], object]) -> None:
    """Call ``then`` with a future, on the loop, once that is done. Raises `TypeError` for what is no future."""
    if is_a(future, asyncio.Future):
        future.add_done_callback(then)
    elif is_a(future, (torch._C.Future, concurrent.futures.Future)):
        # it is completed on a thread of its own
        future.add_done_callback(lambda done: loop.call_soon_threadsafe(then, done))
    else:
        raise TypeError(
            f"a function marked with async_execution must return a Future, and {name} returned {type_name_of(future)}"
        )


def value_of(future: Any) -> Any:
    """The value of a future that is done. Raises its error."""
    return future.result() if hasattr(future, "result") else future.value()


async def await_future(future: Any, name: str, loop: asyncio.AbstractEventLoop) -> Any:
    """The value of a future."""
    if is_a(future, asyncio.Future):
        return await future
    done = loop.create_future()
    when_done(future, name, loop, lambda _: None if done.done() else done.set_result(None))
    await done
    return value_of(future)
