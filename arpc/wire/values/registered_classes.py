"""Instances of registered classes: how a pickle may make one, and which attributes it may set.

The code of a registered class is trusted: its constructor with any arguments, and a ``__setstate__`` that it defines
with any state. What it inherits from native types is not: some of their constructors allocate as much memory as an
argument says, and native code relies on some of their attributes.
"""

from __future__ import annotations

import datetime as dt
from collections import OrderedDict, deque
from collections.abc import Iterator
from decimal import Decimal
from enum import Enum
from types import BuiltinFunctionType, FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any, Final, cast

from torch import Tensor

from arpc.errors import NotAllowedError
from arpc.wire.values.allowlist import CLASSES, MAKERS, TENSOR_CLASSES
from arpc.wire.values.checked_functions import is_plain, kind_of
from arpc.wire.values.exceptions import check_arguments, check_exception, set_native_attribute

__all__ = ["check_container", "check_made", "construct", "make_bare", "set_state", "set_tensor_state"]

_NATIVE_DATA: Final = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, deque)
_HEAP_TYPE: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_MISSING: Final = object()
_MAX_EXPONENT: Final = 10_000
"""The largest exponent of a Decimal, in both directions: as an int, or as plain text, it has about as many digits."""


# -- making


def construct(cls: type, args: tuple[Any, ...]) -> Any:
    """Call a registered class. Raises `NotAllowedError`, or any error of the class."""
    _check_arguments(cls, args)
    made = cls(*args)
    check_made(made)
    return made


def make_bare(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``__new__`` of a registered class, as pickle does. Raises `NotAllowedError`, or any error of the class."""
    _check_arguments(cls, (*args, *kwargs.values()))
    made = cls.__new__(cls, *args, **kwargs)
    check_made(made)
    return made


def _check_arguments(cls: type, args: tuple[Any, ...]) -> None:
    if issubclass(cls, BaseExceptionGroup) or (issubclass(cls, BaseException) and not _defines_construction(cls)):
        check_arguments(cls, args)
    elif issubclass(cls, Enum):
        # An enum looks its argument up, and formats it in an error
        if len(args) != 1 or not is_plain(args[0]):
            raise NotAllowedError(f"a member of {cls.__qualname__} is named by its value, a number or a text")
    elif issubclass(cls, _NATIVE_DATA) and not _defines_construction(cls):
        for value in args:
            # a range or an int takes a few bytes in a pickle, and would take any number of them as a list, or as bytes
            if type(value) not in _allowed_contents(cls):
                raise NotAllowedError(f"a {cls.__qualname__} is not made of {kind_of(value)}")


def _defines_construction(cls: type) -> bool:
    """Whether a registered class handles the arguments in code of its own, not in an inherited native constructor."""
    return any(
        isinstance(vars(base).get(name), staticmethod | FunctionType)
        for base in cls.__mro__
        if base in CLASSES
        for name in ("__new__", "__init__")
    )


def _allowed_contents(cls: type) -> tuple[type, ...]:
    if issubclass(cls, bytes | bytearray):
        return (bytes, bytearray, str)
    if issubclass(cls, int | float | complex | str):
        return (int, float, complex, str, bool, bytes)
    return (list, tuple, dict, set, frozenset)


def check_made(made: Any) -> None:
    """Refuse an instance for which native code would read out of bounds, or take any amount of memory."""
    if isinstance(made, BaseException):
        check_exception(made)
    elif isinstance(made, dt.date | dt.time):
        _check_date(made)
    elif isinstance(made, Decimal) and made.is_finite() and abs(made.adjusted()) > _MAX_EXPONENT:
        raise NotAllowedError(f"a Decimal with an exponent beyond {_MAX_EXPONENT}")


def _check_date(made: dt.date | dt.time) -> None:
    """Check a date or time by making it again from numbers: its constructor checks numbers, but not bytes."""
    try:
        if isinstance(made, dt.date):
            dt.date(made.year, made.month, made.day)
        if isinstance(made, dt.time | dt.datetime):
            dt.time(made.hour, made.minute, made.second, made.microsecond)
    except ValueError as error:
        raise NotAllowedError(f"a date or time that cannot be: {error}") from None


# -- state


def set_state(made: Any, state: Any) -> None:
    """Set the state of an instance, as pickle's BUILD does. Raises `NotAllowedError`, or any error of the class."""
    cls = type(made)
    if isinstance(made, Enum):
        raise NotAllowedError(f"a message that changes a member of {cls.__qualname__}, which is there once for all")
    is_exception = id(cls) in MAKERS and issubclass(cls, BaseException)
    if not (cls in CLASSES or is_exception or cls is OrderedDict):
        raise NotAllowedError(f"a message that changes {cls.__qualname__} while it is read")
    _apply_state(made, state, BaseException)
    check_made(made)


def set_tensor_state(made: Tensor, state: Any) -> Tensor:
    """Set the attributes of a tensor of a registered subclass. Raises `NotAllowedError`, or any error of the class."""
    _apply_state(made, state, Tensor)
    return made


def _apply_state(made: Any, state: Any, base: type) -> None:
    """Call the ``__setstate__`` that a registered class defines. If there is only that of ``base``, set attributes."""
    cls = type(made)
    definer = next((each for each in cls.__mro__ if "__setstate__" in vars(each)), None)
    if definer is None or definer is base:
        _set_attributes(made, state)
        return
    if definer not in CLASSES and definer not in TENSOR_CLASSES:
        raise NotAllowedError(
            f"the state of a {cls.__qualname__} is set by {definer.__qualname__}.__setstate__, and that class is not "
            f"known to arpc.register_type"
        )
    cast("Any", cls).__setstate__(made, state)


def _set_attributes(made: Any, state: Any) -> None:
    cls = type(made)
    attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    for name, value in _items(cls, attributes):
        if isinstance(made, BaseException) and set_native_attribute(made, name, value):
            continue
        _check_name(cls, name)
        try:
            own = vars(made)
        except TypeError:
            raise NotAllowedError(f"a message that sets attributes of a {cls.__qualname__}, which has none") from None
        own[name] = value
    for name, value in _items(cls, slots):
        if name not in _slots_of(cls):
            raise NotAllowedError(f"a message that sets {cls.__qualname__}.{name[:100]}, which is no slot of its own")
        setattr(made, name, value)


def _items(cls: type, attributes: Any) -> Iterator[tuple[str, Any]]:
    if attributes is None:
        return
    if type(attributes) is not dict:
        raise NotAllowedError(f"the state of a {cls.__qualname__} is {kind_of(attributes)} and not a dict")
    for name, value in attributes.items():
        if type(name) is not str or (name.startswith("__") and name.endswith("__") and name != "__notes__"):
            raise NotAllowedError(f"a message that sets an attribute of {cls.__qualname__} that belongs to Python")
        yield name, value


def _check_name(cls: type, name: str) -> None:
    """Refuse an attribute that would replace a method, or one of native code."""
    found = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), _MISSING)
    if found is _MISSING:
        return
    if isinstance(found, GetSetDescriptorType | MemberDescriptorType):
        raise NotAllowedError(f"a message that sets {cls.__qualname__}.{name}, which is not in its __dict__")
    is_declared = any(name in vars(base).get("__annotations__", {}) for base in cls.__mro__)
    if not is_declared and (callable(found) or isinstance(found, classmethod | staticmethod | BuiltinFunctionType)):
        raise NotAllowedError(f"a message that replaces the method {cls.__qualname__}.{name} of an instance")


def _slots_of(cls: type) -> set[str]:
    """Return the names that the ``__slots__`` of classes in Python have added."""
    return {
        name
        for base in cls.__mro__
        if base.__flags__ & _HEAP_TYPE and "__slots__" in vars(base)
        for name, found in vars(base).items()
        if isinstance(found, MemberDescriptorType)
    }


# -- items


def check_container(container: Any, *plain: type) -> None:
    """Refuse to add items to an object that is no container, whose methods of that name may do something else."""
    kind = type(container)
    if kind not in plain and (kind not in CLASSES or isinstance(container, Enum | BaseException)):
        raise NotAllowedError(f"a message that adds to {kind.__qualname__} while it is read")
