"""Combine the arguments of many calls into one call, and divide its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from arpc.errors import BatchError

__all__ = ["gather", "kind_of", "scatter"]


def kind_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the kind of a call. Calls of one kind can be combined: arguments match, and tensors can be stacked."""
    kind: list[Any] = [_outline(arg) for arg in args]
    for name in sorted(kwargs):
        kind += name, _outline(kwargs[name])
    return tuple(kind)


def _outline(value: Any) -> Any:
    return (value.shape, value.dtype, value.device, value.layout) if isinstance(value, Tensor) else None


def gather(calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of one call for all: tensors stacked along a new first dimension, other values in lists."""
    args, kwargs = calls[0]
    return (
        [_column([call[0][place] for call in calls]) for place in range(len(args))],
        {name: _column([call[1][name] for call in calls]) for name in kwargs},
    )


def _column(values: list[Any]) -> Any:
    if not isinstance(values[0], Tensor):
        return values
    return values[0].unsqueeze(0) if len(values) == 1 else torch.stack(values)


def scatter(result: Any, count: int, name: str) -> list[Any]:
    """Divide one result among ``count`` calls. Raises `BatchError` if it cannot be divided.

    Each call gets a row of a tensor, or an item of a list. From a tuple or dict of such results, each call gets a tuple
    or dict with its part of each. None is the result of every call.
    """
    if result is None:
        return [None] * count
    if isinstance(result, Tensor):
        if not result.dim() or len(result) != count:
            raise BatchError(
                f"{name} was called for {count} calls, and returned a tensor of shape {list(result.shape)}"
            )
        return list(result.unbind())
    if isinstance(result, list):
        if len(result) != count:
            raise BatchError(f"{name} was called for {count} calls, and returned a list of {len(result)} items")
        return result
    if isinstance(result, tuple):
        parts = [scatter(part, count, name) for part in result]
        make: Any = getattr(type(result), "_make", tuple)  # a NamedTuple stays one
        return [make(row) for row in zip(*parts, strict=True)] if parts else [()] * count
    if isinstance(result, dict):
        columns = {key: scatter(part, count, name) for key, part in result.items()}
        return [{key: column[place] for key, column in columns.items()} for place in range(count)]
    raise BatchError(
        f"{name} was called for {count} calls, and returned {type(result).__qualname__}: return a tensor whose rows, "
        f"or a list whose items are the results of the calls, or a tuple or dict of such"
    )
