"""Operators of torch by name: those of ``torch.ops``, and builtins as TorchScript finds them."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from arpc.errors import SerializationError
from arpc.private.torch import operator_named, overload_name, packet_name
from arpc.torchjit import find_builtin
from arpc.wire.values.pickler import Pickling

__all__ = ["Operator", "builtin_operator", "reduce_overload", "reduce_packet"]


class Operator:
    """A builtin operator of torch. A call runs the overload that fits its arguments, as in TorchScript.

    >>> Operator("aten::add")(torch.ones(2), 1)
    tensor([2., 2.])

    If none fits, torch raises a RuntimeError with the reason for each: ``Overloaded torch operator invoked from Python
    failed to match any schema``. Raises `SerializationError` if torch has no operator of that name.
    """

    def __init__(self, name: str) -> None:
        call = operator_named(name)
        if call is None:
            raise SerializationError(f"torch has no operator {name!r} in this process: import what registers it")
        self._call = call
        self.__name__ = name

    def __reduce__(self) -> tuple[Any, ...]:
        return Operator, (self.__name__,)

    def __repr__(self) -> str:
        return f"Operator({self.__name__!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Operator) and other.__name__ == self.__name__

    def __hash__(self) -> int:
        return hash((Operator, self.__name__))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


def builtin_operator(function: object) -> Operator | None:
    """Return the operator behind a function such as ``torch.add``; None if TorchScript knows none.

    >>> builtin_operator(torch.add)
    Operator('aten::add')
    """
    name = find_builtin(function)
    return None if name is None else Operator(name)


def reduce_packet(packet: Any, _: Pickling) -> tuple[Any, ...]:
    """Pickle a packet by its name in ``torch.ops``."""
    return _packet, (packet_name(packet),)


def reduce_overload(overload: Any, _: Pickling) -> tuple[Any, ...]:
    """Pickle an overload by the name of its packet in ``torch.ops``, and its own."""
    return _overload, (packet_name(overload.overloadpacket), overload_name(overload))


def _packet(name: str) -> OpOverloadPacket[Any, Any]:
    namespace, _, operator = name.partition("::")
    try:
        found: OpOverloadPacket[Any, Any] = getattr(getattr(torch.ops, namespace), operator)
    except AttributeError:
        raise SerializationError(f"torch has no operator {name!r} in this process: import what registers it") from None
    return found


def _overload(name: str, overload: str) -> OpOverload[Any, Any]:
    found: OpOverload[Any, Any] = getattr(_packet(name), overload)
    return found
