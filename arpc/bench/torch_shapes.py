"""The shapes of `arpc.bench.shapes`, as a user of torch.distributed.rpc calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, cast

from torch.distributed import autograd as untyped_autograd
from torch.distributed import rpc

from arpc.bench.blocking_caller import BlockingCall, StartedCall
from arpc.bench.shapes import Shape, Use
from arpc.bench.systems import CALLEE

__all__ = ["call_of", "started_call_of"]

autograd = cast("Any", untyped_autograd)  # torch has no types for it


def call_of(shape: Shape) -> BlockingCall:
    """Return a function that makes one call of a shape. Torch has no coroutines: the called functions are plain."""
    return _MAKERS[shape.use](shape, shape.called("def"), shape.arguments())


def started_call_of(shape: Shape) -> StartedCall | None:
    """Return a function that starts one call of a shape, to be waited for later; None if torch can only block."""
    called, args = shape.called("def"), shape.arguments()
    if shape.use == "call":
        return partial(rpc.rpc_async, CALLEE, called, args, dict(shape.keywords) or None)
    if shape.use == "method":
        rref: Any = rpc.remote(CALLEE, called)
        return lambda: rref.rpc_async().add(*args)
    return None


def _call(shape: Shape, called: Any, args: tuple[Any, ...]) -> BlockingCall:
    return partial(rpc.rpc_sync, CALLEE, called, args, dict(shape.keywords) or None)


def _method(_: Shape, called: Any, args: tuple[Any, ...]) -> BlockingCall:
    rref: Any = rpc.remote(CALLEE, called)
    return lambda: rref.rpc_sync().add(*args)


def _remote(_: Shape, called: Any, args: tuple[Any, ...]) -> BlockingCall:
    return lambda: rpc.remote(CALLEE, called, args).to_here()


def _context(_: Shape, called: Any, args: tuple[Any, ...]) -> BlockingCall:
    def step() -> Any:
        with autograd.context():
            return rpc.rpc_sync(CALLEE, called, args)

    return step


def _chain(shape: Shape, called: Any, args: tuple[Any, ...]) -> BlockingCall:
    callees = shape.callees

    def step() -> None:
        first, value = args
        with autograd.context() as context_id:
            for callee in callees:
                value = rpc.rpc_sync(callee, called, (first, value))
            autograd.backward(context_id, [value])
            assert len(autograd.get_gradients(context_id)) == len(args)

    return step


def _side_by_side(shape: Shape, called: Any, args: tuple[Any, ...]) -> BlockingCall:
    callees = shape.callees

    def step() -> None:
        with autograd.context() as context_id:
            calls = [rpc.rpc_async(callee, called, args) for callee in callees]
            total: Any = sum([call.wait() for call in calls])
            autograd.backward(context_id, [total])
            assert len(autograd.get_gradients(context_id)) == len(args)

    return step


_MAKERS: Final[Mapping[Use, Callable[[Shape, Any, tuple[Any, ...]], BlockingCall]]] = {
    "call": _call,
    "method": _method,
    "remote": _remote,
    "context": _context,
    "chain": _chain,
    "side by side": _side_by_side,
}
