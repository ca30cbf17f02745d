"""The shapes of `arpc.bench.shapes`, as a user of torch.distributed.rpc calls them."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from torch.distributed import autograd as untyped_autograd
from torch.distributed import rpc

from arpc.bench.blocking_caller import BlockingCall, StartedCall
from arpc.bench.shapes import Shape
from arpc.bench.systems import CALLEE

__all__ = ["call_of", "started_call_of"]

autograd = cast("Any", untyped_autograd)  # torch has no types for it


def call_of(shape: Shape) -> BlockingCall:
    """What makes one call of a shape. Torch has no coroutines: what is called is plain."""
    called, args, keywords = shape.called("def"), shape.arguments(), dict(shape.keywords) or None
    match shape.use:
        case "call":
            return partial(rpc.rpc_sync, CALLEE, called, args, keywords)
        case "method":
            rref: Any = rpc.remote(CALLEE, called)
            return lambda: rref.rpc_sync().add(*args)
        case "remote":
            return lambda: rpc.remote(CALLEE, called, args).to_here()
        case "context":
            return partial(_in_context, called, args)
        case "chain":
            return partial(_chain, called, args, shape.count)
        case "side by side":
            return partial(_side_by_side, called, args, shape.count)


def started_call_of(shape: Shape) -> StartedCall:
    """What starts one call of a shape, to be waited for later."""
    return partial(rpc.rpc_async, CALLEE, shape.called("def"), shape.arguments(), dict(shape.keywords) or None)


def _in_context(called: Any, args: tuple[Any, ...]) -> Any:
    with autograd.context():
        return rpc.rpc_sync(CALLEE, called, args)


def _chain(called: Any, args: tuple[Any, ...], count: int) -> None:
    first, value = args
    with autograd.context() as context_id:
        for _ in range(count):
            value = rpc.rpc_sync(CALLEE, called, (first, value))
        autograd.backward(context_id, [value])
        assert len(autograd.get_gradients(context_id)) == len(args)


def _side_by_side(called: Any, args: tuple[Any, ...], count: int) -> None:
    with autograd.context() as context_id:
        calls = [rpc.rpc_async(CALLEE, called, args) for _ in range(count)]
        total: Any = sum([call.wait() for call in calls])
        autograd.backward(context_id, [total])
        assert len(autograd.get_gradients(context_id)) == len(args)
