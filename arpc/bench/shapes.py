"""Ordinary shapes of calls, as lists. A new shape is one line in one of them.

A runtime that is fast for one shape only is fast in its own benchmark and nowhere else: what counts is the worst ratio.
Torch is imported when arguments are made, so that the main process can read the lists without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Literal

from arpc.bench.functions import Flavour
from arpc.bench.systems import callee_name

__all__ = ["BY_NAME", "FAMILIES", "GROWTH", "SPREAD", "SPREAD_AT_MOST", "Family", "Growth", "Shape", "Use"]

Use = Literal["call", "method", "remote", "context", "chain", "side by side"]
"""The way in which a function is used.

``call``: it is called, and its result awaited. ``method``: the method ``add`` of a remote object, of a class instead of
a function. ``remote``: `remote`, then `to_here`. ``context``: a call in an autograd context. ``chain`` and ``side by
side``: ``count`` calls in an autograd context, each with the result before or all with the same arguments, and a
backward pass. Where there are several workers, these calls go to them in turn.
"""


# -- the functions that are called, plain and as coroutines


def noop() -> None:
    """Do nothing."""


async def noop_async() -> None:
    """Do nothing."""


def add(left: Any, right: Any) -> Any:
    """Add two values."""
    return left + right


async def add_async(left: Any, right: Any) -> Any:
    """Add two values."""
    return left + right


def echo(value: Any) -> Any:
    """Send a value back."""
    return value


async def echo_async(value: Any) -> Any:
    """Send a value back."""
    return value


def first(*values: Any, **_: Any) -> Any:
    """Send the first value back."""
    return values[0]


async def first_async(*values: Any, **_: Any) -> Any:
    """Send the first value back."""
    return values[0]


def pair(value: Any) -> tuple[Any, float]:
    """Send a value back with a number."""
    return value, 1.5


async def pair_async(value: Any) -> tuple[Any, float]:
    """Send a value back with a number."""
    return value, 1.5


def mul(x: Any, y: Any) -> Any:
    """Multiply, and sum up."""
    return (x * y).sum()


async def mul_async(x: Any, y: Any) -> Any:
    """Multiply, and sum up."""
    return (x * y).sum()


class Counter:
    """Counts."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, more: int) -> int:
        """Count further."""
        self.count += more
        return self.count


class AsyncCounter(Counter):
    """Counts in coroutines."""

    async def add(self, more: int) -> int:  # type: ignore[override]  # that is the point
        """Count further."""
        return super().add(more)


_CALLED: Final[Mapping[str, Mapping[Flavour, Any]]] = {
    "noop": {"def": noop, "async": noop_async},
    "add": {"def": add, "async": add_async},
    "echo": {"def": echo, "async": echo_async},
    "first": {"def": first, "async": first_async},
    "pair": {"def": pair, "async": pair_async},
    "mul": {"def": mul, "async": mul_async},
    "counter": {"def": Counter, "async": AsyncCounter},
}


# -- the lists


@dataclass(frozen=True, slots=True)
class Shape:
    """One way to call a function, with its arguments."""

    name: str
    function: str
    arguments: Callable[[], tuple[Any, ...]] = tuple
    keywords: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    use: Use = "call"
    count: int = 1
    workers: int = 1
    flavours: tuple[Flavour, ...] = ("async", "def")

    @property
    def has_floor(self) -> bool:
        """Whether it is one request and one reply, which is all that the floor supports."""
        return self.use in {"call", "method"}

    @property
    def callees(self) -> tuple[str, ...]:
        """The worker that each of its calls goes to."""
        return tuple(callee_name(number % self.workers) for number in range(self.count))

    def called(self, flavour: Flavour) -> Any:
        """Return the function or class, plain or with coroutines."""
        return _CALLED[self.function][flavour]


@dataclass(frozen=True, slots=True)
class Family:
    """Shapes with one goal: how many times as fast as torch each must be, on one CPU and on two."""

    name: str
    same: float
    split: float
    shapes: tuple[Shape, ...]
    of_floor: float | None = None
    """The multiple of the floor of the same payload that a shape with a floor may take; None for no limit."""
    at_once: float = 12
    """The speed-up goal for calls per second, with 64 in flight."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Two shapes, of which one has ``more`` of something, and how many microseconds each of these may add."""

    name: str
    few: str
    many: str
    more: int
    at_most_us: float


def _tensor(*sizes: int, requires_grad: bool = False) -> Any:
    import torch  # slow, and the main process does not need it

    return torch.rand(*sizes, requires_grad=requires_grad)


def _list_of(count: int, size: int) -> tuple[list[Any]]:
    return ([_tensor(size) for _ in range(count)],)


def _dict_of(count: int, size: int) -> tuple[dict[str, Any]]:
    return ({f"layer{number}.weight": _tensor(size) for number in range(count)},)


def _leaves() -> tuple[Any, Any]:
    return _tensor(64, requires_grad=True), _tensor(64, requires_grad=True)


def _flavours(count: int) -> tuple[Flavour, ...]:
    """Return the flavours of a step: no plain functions in the longest steps, which would take too much of a run."""
    return ("async", "def") if count < 100 else ("async",)


_RECORD: Final = {"a": [1, 2, 3], "b": "text", "c": 1.5}

CALLS: Final = (
    Shape("no arguments", "noop"),
    Shape("an int", "echo", lambda: (7,)),
    Shape("two ints", "add", lambda: (1, 2)),
    Shape("five arguments", "first", lambda: (1, 2.5, "three", None, True)),
    Shape("keyword arguments", "first", lambda: ("layer1",), {"step": 3, "lr": 0.5}),
    Shape("a text", "echo", lambda: ("a line of text",)),
    Shape("bytes", "echo", lambda: (bytes(1000),)),
    Shape("dict of lists, text, floats", "echo", lambda: (_RECORD,)),
    Shape("nested containers", "echo", lambda: ([(1, {"x": [2, 3]}), {"y": (4.0, "z")}],)),
    Shape("16-float tensor", "echo", lambda: (_tensor(16),)),
    Shape("4 KB tensor", "echo", lambda: (_tensor(1024),)),
    Shape("tensor and int", "first", lambda: (_tensor(16), 3)),
    Shape("tensor and keyword", "first", lambda: (_tensor(16),), {"step": 3}),
    Shape("two tensors", "add", lambda: (_tensor(16), _tensor(16))),
    Shape("three tensors and a dict", "first", lambda: (_tensor(16), _tensor(2, 3), _tensor(4), {"step": 1})),
    Shape("tensor in, tuple out", "pair", lambda: (_tensor(16),)),
    Shape("tensor in a dict", "echo", lambda: ({"x": _tensor(16), "step": 3},)),
    Shape("16-float numpy array", "echo", lambda: (_tensor(16).numpy(),)),
    Shape("empty tensor", "echo", lambda: (_tensor(0),)),
    Shape("transposed tensor", "echo", lambda: (_tensor(4, 8).t(),)),
)
CONTAINERS: Final = (
    Shape("list of 10 tensors", "echo", lambda: _list_of(10, 64)),
    Shape("list of 100 tensors", "echo", lambda: _list_of(100, 64)),
    Shape("list of 1,000 tensors", "echo", lambda: _list_of(1000, 16), flavours=("async",)),
    Shape("dict of 10 tensors", "echo", lambda: _dict_of(10, 64)),
    Shape("dict of 50 tensors of 4 KB", "echo", lambda: _dict_of(50, 1024)),
    Shape("dict of 1,000 tensors", "echo", lambda: _dict_of(1000, 16), flavours=("async",)),
)
RREFS: Final = (
    Shape("method", "counter", lambda: (1,), use="method"),
    Shape("remote() and to_here()", "noop", use="remote"),
    Shape("tensor, remote() and to_here()", "echo", lambda: (_tensor(16),), use="remote"),
    Shape("remote(Class) and to_here()", "counter", use="remote", flavours=("def",)),
)
_COUNTS: Final = (1, 2, 3, 5, 10, 100)
GRADIENTS: Final = (
    Shape("context, nothing requires grad", "echo", lambda: (_tensor(16),), use="context"),
    *(Shape(f"{n} in a row", "mul", _leaves, use="chain", count=n, flavours=_flavours(n)) for n in _COUNTS),
    *(Shape(f"{n} side by side", "mul", _leaves, use="side by side", count=n, flavours=_flavours(n)) for n in _COUNTS),
)
THREE_WORKERS: Final = tuple(
    replace(shape, workers=3, flavours=("async",)) for shape in GRADIENTS if shape.use != "context"
)

FAMILIES: Final = (
    Family("call", 6, 10, CALLS, of_floor=1.6),
    Family("containers", 5, 5, CONTAINERS),
    Family("rref", 5, 8, RREFS, of_floor=1.6),
    Family("autograd", 3, 4, GRADIENTS),
    Family("autograd on three workers", 3, 4, THREE_WORKERS),
)
BY_NAME: Final[Mapping[str, Shape]] = {
    f"{family.name}/{shape.name}": shape for family in FAMILIES for shape in family.shapes
}
"""The shapes by the name of their family and their own."""

SPREAD: Final = ("an int", "a text", "dict of lists, text, floats", "16-float tensor", "16-float numpy array")
"""Calls with one small argument, which are compared with the one that has none."""
SPREAD_AT_MOST: Final = 2.0

GROWTH: Final = (
    Growth("a further tensor, of 10", "call/16-float tensor", "containers/list of 10 tensors", 9, 5),
    Growth("a further tensor, of 100", "call/16-float tensor", "containers/list of 100 tensors", 99, 5),
    Growth("a further tensor, of 1,000", "call/16-float tensor", "containers/list of 1,000 tensors", 999, 5),
    Growth("a further chained call, of 10", "autograd/1 in a row", "autograd/10 in a row", 9, 300),
    Growth("a further chained call, of 100", "autograd/1 in a row", "autograd/100 in a row", 99, 300),
)
"""The limits for the growth of the time with the size of a message and of a step."""
