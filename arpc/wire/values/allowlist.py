"""What may be called and what may be built here, for workers that do not trust the pickles of others.

A pickle is a program: it names functions and classes of any module, and calls them. In allow-list mode it names what
is in the lists of this module and nothing else. No module is imported for it and no attribute looked up.
`wire.values.allowed_values`, `wire.values.arrays` and `wire.values.exceptions` put in what is there from the start;
`wire.values.restricted` reads pickles by the lists.
"""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType, MethodDescriptorType, MethodType
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor

from arpc.errors import ConfigurationError, NotAllowedError
from arpc.torchjit import ScriptFunction, ScriptMethod
from arpc.wire.values.checked_functions import Check, Checked
from arpc.wire.values.reducers import MAIN_NAMES, importable_name

__all__ = [
    "CLASSES",
    "EXPORTED",
    "MAKERS",
    "NAMES",
    "QUICK",
    "TENSOR_CLASSES",
    "Key",
    "add_maker",
    "allow_function",
    "callable_named",
    "export",
    "key_of",
    "may_call_method",
    "register_type",
    "shown",
]

T = TypeVar("T", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

Key = tuple[str, str]
"""Module and qualified name, as a pickle says them."""


class _Classes:
    """Classes by the names that pickles have for them."""

    def __init__(self) -> None:
        self.by_key: dict[Key, type] = {}
        self._by_id: dict[int, type] = {}

    def __contains__(self, obj: object) -> bool:
        """Whether this very object is among them; what it takes itself to be equal to does not matter."""
        return id(obj) in self._by_id

    def add(self, cls: type) -> None:
        self.by_key[key_of(cls)] = self._by_id[id(cls)] = cls


# These are declarations about code, made where the code is; not state of a worker.
EXPORTED: Final[dict[Key, Callable[..., Any]]] = {}
"""What others may call, and a pickle may name if the role of its sender allows it."""
QUICK: Final[dict[Key, Any]] = {}
"""What pickle's own reader in C may find: `Checked` functions whose results have no state, and immutable objects."""
NAMES: Final[dict[Key, Any]] = {}
"""What the careful reader finds, too: `Checked` functions, and what a pickle may name and not call."""
CLASSES: Final = _Classes()
"""Registered classes: the careful reader makes instances of them, see `wire.values.registered_classes`."""
TENSOR_CLASSES: Final = _Classes()
"""Registered subclasses of Tensor. A pickle names one and does not call it: that would give it memory of others."""
MAKERS: Final[dict[int, Checked]] = {}
"""By the id of a class among the names: what makes an instance when a pickle calls the class."""

_MAX_SHOWN: Final = 200
_NOT_DATA: Final = (type, np.ndarray, np.generic, np.dtype, memoryview, torch.UntypedStorage, torch.TypedStorage)


def key_of(obj: Any) -> Key:
    """How pickles name something. Raises `ConfigurationError` for what others cannot name."""
    module, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    if isinstance(obj, BuiltinFunctionType | MethodDescriptorType):
        found = importable_name(obj)
        if found is None:
            raise ConfigurationError(f"{obj!r} has no name by which others could call it")
        return found
    if isinstance(obj, ScriptFunction | ScriptMethod):
        # its module and name are those of its class
        raise ConfigurationError(
            f"{obj.name} is compiled by TorchScript, and has no name by which others could call it in allow-list mode: "
            f"export a plain function that calls it"
        )
    if not isinstance(module, str) or not isinstance(name, str) or "<" in name or isinstance(obj, MethodType):
        raise ConfigurationError(f"{obj!r} has no name by which others could call it: define it in a module")
    return _shared_module(module), name


def export(function: T) -> T:
    """Let others call a function in allow-list mode (``RpcOptions(allow="exported")``); without that it means nothing.

    Of a class, others may make instances and call the public methods that it defines itself, through RRefs. Functions
    of other libraries can be exported too: ``arpc.export(torch.add)``.

    >>> @export
    ... async def add(a: int, b: int) -> int:
    ...     return a + b
    """
    if not callable(function):
        raise TypeError(f"export is for what can be called, and {type(function).__qualname__} cannot")
    EXPORTED[key_of(function)] = function
    return function


def register_type(cls: C) -> C:
    """Let instances of a class travel in allow-list mode; without that it means nothing.

    A peer may call the class with any arguments, and set any attribute of the instance that is no method and has no
    name with two underscores on both sides. A ``__setstate__`` that the class defines is called with any state.
    Register plain data (dataclasses, named tuples, enums, exceptions, subclasses of Tensor), and no class that opens
    files or executes its arguments. A subclass of Tensor is never called: its instances are made of tensors that came
    with the message.

    >>> @register_type
    ... class Point(tuple):
    ...     pass
    """
    if not isinstance(cls, type):
        raise TypeError(f"register_type is for classes, and {cls!r} is none")
    if issubclass(cls, _NOT_DATA) or cls is Tensor:
        raise TypeError(f"register_type is for classes of plain data, and {cls.__qualname__} is none")
    (TENSOR_CLASSES if issubclass(cls, Tensor) else CLASSES).add(cls)
    return cls


def allow_function(*checks: Check, required: int | None = None) -> Callable[[T], T]:
    """Let pickles call a function of the runtime while they are read, with arguments that pass these checks."""

    def add(function: T) -> T:
        NAMES[key_of(function)] = Checked(function.__qualname__, function, *checks, required=required)
        return function

    return add


def add_maker(key: Key, cls: type, maker: Checked) -> None:
    """Let pickles name a class that is not registered, and have its instances made by something that checks."""
    NAMES[key] = cls
    MAKERS[id(cls)] = maker


def shown(key: Key) -> str:
    """A name that a peer has chosen, for an error or a log: on one line, and not long."""
    name = ".".join(key)
    return name if len(name) <= _MAX_SHOWN and name.isprintable() else ascii(name[:_MAX_SHOWN])


def callable_named(key: Key) -> Callable[..., Any]:
    """The exported function of that name. Raises `NotAllowedError`."""
    found = EXPORTED.get(key)
    if found is None:
        raise NotAllowedError(
            f"{shown(key)} is not exported here: mark it with @arpc.export, in a module that this worker imports"
        )
    return found


def may_call_method(cls: type, name: str) -> bool:
    """Whether others may call a method of an instance.

    They may if it is exported, or public and of an exported class that defines it. An instance of an exported class can
    be called itself, whoever defines how.
    """
    if type(name) is not str:
        return False
    if name == "__call__":
        return _is_exported_class(cls)
    for base in cls.__mro__:
        if name in vars(base):
            key = _shared_module(base.__module__), f"{base.__qualname__}.{name}"
            return key in EXPORTED or (not name.startswith("_") and _is_exported_class(base))
    return False


def _is_exported_class(cls: type) -> bool:
    return EXPORTED.get((_shared_module(cls.__module__), cls.__qualname__)) is cls


def _shared_module(module: str) -> str:
    """What pickles call a module: the script has one name, whether or not multiprocessing has started it."""
    return "__main__" if module in MAIN_NAMES else module
