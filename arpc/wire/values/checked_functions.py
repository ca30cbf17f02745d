"""Functions that a pickle may call while it is read, each with checks for all its arguments.

A restricted reader calls only registered classes, `Checked` functions, and a few immutable builtin types. A `Checked`
has a check for every argument, and runs all of them before the call, so that no function of the runtime gets a value
whose type it does not expect. Checks compare the exact type: a subclass may bring code of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from arpc.errors import NotAllowedError
from arpc.wire.values.table import MAX_DIMENSIONS

__all__ = [
    "ANYTHING",
    "FLAG",
    "NUMBER",
    "SCALARS",
    "SIZES",
    "TENSOR",
    "TEXT",
    "WORKER_ID",
    "WORKER_NAME",
    "Check",
    "Checked",
    "all_of",
    "exactly",
    "integer",
    "is_plain",
    "kind_of",
]

SCALARS: Final = frozenset((int, float, complex, bool, str, bytes, type(None)))
"""Objects of exactly these types need no slots, and pickling them runs no code but the pickler's own."""
_MAX_PLAIN_ITEMS: Final = 1000


class Check(NamedTuple):
    """A condition for an argument: in words, and as a test."""

    what: str
    holds: Callable[[Any], bool]


class Checked:
    """A callable of the runtime in a form that a pickle can only call, and not change: it has no attributes.

    ``checks`` are for the arguments in their order, of which the first ``required`` (by default all) are mandatory.
    ``rest``, if given, is for any number of further arguments. If a check fails, a call raises `NotAllowedError` and
    calls nothing.
    """

    __slots__ = ("_call", "_checks", "_name", "_required", "_rest")
    _call: Callable[..., Any]
    _checks: tuple[Check, ...]
    _name: str
    _required: int
    _rest: Check | None

    def __init__(
        self,
        name: str,
        call: Callable[..., Any],
        *checks: Check,
        required: int | None = None,
        rest: Check | None = None,
    ) -> None:
        write = object.__setattr__
        write(self, "_name", name)
        write(self, "_call", call)
        write(self, "_checks", checks)
        write(self, "_required", len(checks) if required is None else required)
        write(self, "_rest", rest)

    def __call__(self, *args: Any) -> Any:
        checks = self._checks
        if self._rest is not None:
            checks += (self._rest,) * (len(args) - len(checks))
        if not self._required <= len(args) <= len(checks):
            raise NotAllowedError(f"a message that makes a {self._name} of {len(args)} values")
        for position, (value, check) in enumerate(zip(args, checks, strict=False)):
            if not check.holds(value):
                raise NotAllowedError(
                    f"a message that makes a {self._name}: value {position} must be {check.what}, not {kind_of(value)}"
                )
        return self._call(*args)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name!r} cannot be set")

    def __repr__(self) -> str:
        return f"Checked({self._name!r})"


def kind_of(obj: Any) -> str:
    """Describe an object for an error by its type: its repr may be long or slow, or run code of its own."""
    return f"the class {obj.__qualname__}" if isinstance(obj, type) else f"a {type(obj).__qualname__}"


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, None, or a short tuple of these."""
    if type(value) is tuple:
        return len(value) <= _MAX_PLAIN_ITEMS and all(type(item) in SCALARS for item in value)
    return type(value) in SCALARS


# -- checks


def exactly(*kinds: type) -> Check:
    """Return a check for an instance of one of these types, and of no subclass."""
    names = [kind.__name__ for kind in kinds]
    return Check(f"of type {' or '.join(names)}", lambda value: type(value) in kinds)


def integer(low: int, high: int) -> Check:
    """Return a check for an int, not a bool, from ``low`` to ``high``."""
    return Check(f"an int from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def all_of(container: type[list[Any] | tuple[Any, ...]], item: Check, limit: int) -> Check:
    """Return a check for a tuple or list of at most ``limit`` items, each of which passes ``item``."""

    def holds(value: Any) -> bool:
        return type(value) is container and len(value) <= limit and all(item.holds(each) for each in value)

    return Check(f"a {container.__name__} of at most {limit} items, each {item.what}", holds)


ANYTHING: Final = Check("anything that may travel", lambda _: True)
TEXT: Final = exactly(str)
FLAG: Final = exactly(bool)
TENSOR: Final = exactly(Tensor, Parameter)
NUMBER: Final = integer(0, (1 << 64) - 1)
"""An id of the runtime."""
WORKER_ID: Final = integer(-1, (1 << 16) - 1)
WORKER_NAME: Final = Check(
    "the name of a worker", lambda value: type(value) is str and 0 < len(value) < 128 and value.isprintable()
)
SIZES: Final = all_of(tuple, integer(0, (1 << 63) - 1), MAX_DIMENSIONS)
