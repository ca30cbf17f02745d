"""Values of Python, torch and arpc that any pickle may make: numbers, dates, containers, sizes, tensors.

Each is made by a function that checks its arguments. Constructors that read bytes (those of dates do) do not check all
of them, although native code relies on them, so the objects that they make are checked before use.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

import torch
from torch import Tensor

from arpc import ids, options
from arpc.errors import NotAllowedError
from arpc.wire.values import reducers as reducing
from arpc.wire.values.allowlist import NAMES, QUICK, TENSOR_CLASSES, add_maker
from arpc.wire.values.checked_functions import (
    ANYTHING,
    FLAG,
    NUMBER,
    SIZES,
    TENSOR,
    TEXT,
    WORKER_ID,
    WORKER_NAME,
    Check,
    Checked,
    exactly,
    integer,
)
from arpc.wire.values.registered_classes import check_made, set_tensor_state

__all__: list[str] = []

_FACTORIES: Final = (int, float, str, bool, bytes, list, dict, set, tuple)
_LAYOUTS: Final = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_MAX_TEXT: Final = 10_000


def _factory(value: Any) -> bool:
    return value is None or any(value is kind for kind in _FACTORIES)


def _checked(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a constructor that checks its results: those of dates do not check bytes, see `check_made`."""

    def checked(*args: Any) -> Any:
        try:
            made = make(*args)
        except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
            raise NotAllowedError(f"a {make.__name__} that cannot be: {error}") from None
        check_made(made)
        return made

    return checked


def _deque(_items: tuple[()] = (), limit: int | None = None) -> deque[Any]:
    return deque(maxlen=limit)


def _bytes_of(size: int) -> Check:
    return Check(f"{size} bytes", lambda value: type(value) is bytes and len(value) == size)


_ZONE: Final = Check("a time zone", lambda value: value is None or isinstance(value, dt.tzinfo))
_COUNT: Final = integer(-(10**12), 10**12)


def _fill_subclass(cls: type[Tensor], tensor: Tensor, requires_grad: bool, state: Any) -> Tensor:
    return set_tensor_state(reducing.as_subclass(cls, tensor, requires_grad), state)


_TENSOR_CLASS: Final = Check(
    "a subclass of Tensor that is known to arpc.register_type",
    lambda value: value is torch.nn.Parameter or value in TENSOR_CLASSES,
)
_WRAPPER_CLASS: Final = Check(
    "a subclass of Tensor that wraps others and is known to arpc.register_type",
    lambda value: value in TENSOR_CLASSES and hasattr(value, "__tensor_unflatten__"),
)
_INNER: Final = Check(
    "a dict of tensors by their names",
    lambda value: (
        type(value) is dict
        and all(type(name) is str for name in value)
        and all(TENSOR.holds(inner) or type(inner) in TENSOR_CLASSES for inner in value.values())
    ),
)


def _fill_lists() -> None:
    a_short_text = Check("a short text", lambda value: type(value) is str and len(value) < 64)
    a_layout = Check("the name of a layout", lambda value: type(value) is str and value in _LAYOUTS)
    nothing = Check("an empty tuple", lambda value: type(value) is tuple and not value)
    a_limit = Check("its limit", lambda value: value is None or (type(value) is int and 0 <= value < 1 << 63))
    a_number = Check("a text", lambda value: type(value) is str and len(value) <= _MAX_TEXT)
    a_factory = Check("a type of numbers, texts or containers", _factory)
    QUICK.update(
        {
            # immutable types whose constructors take a few numbers, and copy nothing
            ("builtins", "complex"): complex,
            ("builtins", "range"): range,
            ("builtins", "slice"): slice,
            ("torch", "Size"): Checked("torch.Size", torch.Size, SIZES),
            ("torch", "device"): Checked(
                "torch.device", _checked(torch.device), a_short_text, integer(0, 127), required=1
            ),
            ("torch.serialization", "_get_layout"): Checked("torch.layout", _LAYOUTS.__getitem__, a_layout),
            ("collections", "deque"): Checked("deque", _deque, nothing, a_limit, required=0),
            ("decimal", "Decimal"): Checked("Decimal", _checked(Decimal), a_number),
            ("datetime", "date"): Checked("date", _checked(dt.date), _bytes_of(4)),
            ("datetime", "time"): Checked("time", _checked(dt.time), _bytes_of(6), _ZONE, required=1),
            ("datetime", "datetime"): Checked("datetime", _checked(dt.datetime), _bytes_of(10), _ZONE, required=1),
            ("datetime", "timedelta"): Checked("timedelta", _checked(dt.timedelta), _COUNT, _COUNT, _COUNT, required=1),
            ("datetime", "timezone"): Checked(
                "timezone", _checked(dt.timezone), exactly(dt.timedelta), TEXT, required=1
            ),
            (reducing.__name__, "_fill_parameter"): Checked("Parameter", reducing.FILL_PARAMETER, TENSOR, FLAG),
        }
    )
    for value in vars(torch).values():
        if isinstance(value, torch.dtype):
            QUICK["torch", str(value).removeprefix("torch.")] = value
    makers: dict[type, Checked] = {
        OrderedDict: Checked("OrderedDict", OrderedDict),
        Counter: Checked("Counter", Counter, exactly(dict)),
        defaultdict: Checked("defaultdict", defaultdict, a_factory, required=0),
        ids.WorkerInfo: Checked("WorkerInfo", ids.WorkerInfo, WORKER_NAME, WORKER_ID),
        ids.GloballyUniqueId: Checked("GloballyUniqueId", ids.GloballyUniqueId, WORKER_ID, NUMBER),
    }
    for cls, maker in makers.items():
        add_maker((cls.__module__, cls.__qualname__), cls, maker)
    NAMES[reducing.__name__, "_fill_subclass"] = Checked(
        "tensor of a subclass", _fill_subclass, _TENSOR_CLASS, TENSOR, FLAG, ANYTHING
    )
    NAMES[reducing.__name__, "fill_wrapper"] = Checked(
        "tensor of a subclass", reducing.fill_wrapper, _WRAPPER_CLASS, _INNER, ANYTHING, SIZES, SIZES, FLAG
    )
    for kind in (*_FACTORIES, frozenset, bytearray, object):
        NAMES["builtins", kind.__name__] = kind
    NAMES["torch", "Tensor"] = Tensor
    NAMES["torch.nn.parameter", "Parameter"] = torch.nn.Parameter
    NAMES["arpc.options", "UNSET"] = options.UNSET


_fill_lists()
