"""The shapes of `arpc.bench.shapes`, as a user of arpc calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import arpc
from arpc.bench.asyncio_caller import Call
from arpc.bench.functions import Flavour
from arpc.bench.shapes import Shape, Use
from arpc.bench.systems import CALLEE

__all__ = ["call_of"]


def call_of(shape: Shape, flavour: Flavour) -> Call:
    """Return a function that makes one call of a shape."""
    return _MAKERS[shape.use](shape, shape.called(flavour), shape.arguments())


def _call(shape: Shape, called: Any, args: tuple[Any, ...]) -> Call:
    return partial(arpc.rpc_sync, CALLEE, called, args, dict(shape.keywords) or None)


def _method(_: Shape, called: Any, args: tuple[Any, ...]) -> Call:
    rref = arpc.remote(CALLEE, called)
    return lambda: rref.rpc_async().add(*args)


def _remote(_: Shape, called: Any, args: tuple[Any, ...]) -> Call:
    return lambda: arpc.remote(CALLEE, called, args).to_here()


def _context(_: Shape, called: Any, args: tuple[Any, ...]) -> Call:
    async def step() -> Any:
        async with arpc.autograd.context():
            return await arpc.rpc_sync(CALLEE, called, args)

    return step


def _chain(shape: Shape, called: Any, args: tuple[Any, ...]) -> Call:
    callees = shape.callees

    async def step() -> None:
        first, value = args
        async with arpc.autograd.context() as context_id:
            for callee in callees:
                value = await arpc.rpc_sync(callee, called, (first, value))
            await arpc.autograd.backward(context_id, [value])
            assert len(arpc.autograd.get_gradients(context_id)) == len(args)

    return step


def _side_by_side(shape: Shape, called: Any, args: tuple[Any, ...]) -> Call:
    callees = shape.callees

    async def step() -> None:
        async with arpc.autograd.context() as context_id:
            calls = [arpc.rpc_async(callee, called, args) for callee in callees]
            total: Any = sum([await call for call in calls])
            await arpc.autograd.backward(context_id, [total])
            assert len(arpc.autograd.get_gradients(context_id)) == len(args)

    return step


_MAKERS: Final[Mapping[Use, Callable[[Shape, Any, tuple[Any, ...]], Call]]] = {
    "call": _call,
    "method": _method,
    "remote": _remote,
    "context": _context,
    "chain": _chain,
    "side by side": _side_by_side,
}
