"""The shapes of `arpc.bench.shapes`, as a user of arpc calls them."""

from __future__ import annotations

from functools import partial
from typing import Any

import arpc
from arpc.bench.asyncio_caller import Call
from arpc.bench.functions import Flavour
from arpc.bench.shapes import Shape
from arpc.bench.systems import CALLEE

__all__ = ["call_of"]


def call_of(shape: Shape, flavour: Flavour) -> Call:
    """What makes one call of a shape."""
    called, args, keywords = shape.called(flavour), shape.arguments(), dict(shape.keywords) or None
    match shape.use:
        case "call":
            return partial(arpc.rpc_sync, CALLEE, called, args, keywords)
        case "method":
            rref = arpc.remote(CALLEE, called)
            return lambda: rref.rpc_async().add(*args)
        case "remote":
            return lambda: arpc.remote(CALLEE, called, args).to_here()
        case "context":
            return partial(_in_context, called, args)
        case "chain":
            return partial(_chain, called, args, shape.count)
        case "side by side":
            return partial(_side_by_side, called, args, shape.count)


async def _in_context(called: Any, args: tuple[Any, ...]) -> Any:
    async with arpc.autograd.context():
        return await arpc.rpc_sync(CALLEE, called, args)


async def _chain(called: Any, args: tuple[Any, ...], count: int) -> None:
    first, value = args
    async with arpc.autograd.context() as context_id:
        for _ in range(count):
            value = await arpc.rpc_sync(CALLEE, called, (first, value))
        await arpc.autograd.backward(context_id, [value])
        assert len(arpc.autograd.get_gradients(context_id)) == len(args)


async def _side_by_side(called: Any, args: tuple[Any, ...], count: int) -> None:
    async with arpc.autograd.context() as context_id:
        calls = [arpc.rpc_async(CALLEE, called, args) for _ in range(count)]
        total: Any = sum([await call for call in calls])
        await arpc.autograd.backward(context_id, [total])
        assert len(arpc.autograd.get_gradients(context_id)) == len(args)
