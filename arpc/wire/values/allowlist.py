"""The lists of what may be called and made here, for workers that do not trust the pickles of their peers.

A pickle is a program: it names functions and classes of any module, and calls them. In allow-list mode it may name only
objects on the lists of this module; no module is imported for it and no attribute looked up.
`wire.values.allowed_values`, `wire.values.arrays` and `wire.values.exceptions` fill the lists at import;
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
"""Module and qualified name, as a pickle has them."""


class _Classes:
    """Classes by their names in pickles."""

    def __init__(self) -> None:
        self.by_key: dict[Key, type] = {}
        self._by_id: dict[int, type] = {}

    def __contains__(self, obj: object) -> bool:
        """Whether this very object is among the classes. Its own ``__eq__`` and ``__hash__`` are not used."""
        return id(obj) in self._by_id

    def add(self, cls: type) -> None:
        self.by_key[key_of(cls)] = self._by_id[id(cls)] = cls


# These are declarations about code, made where the code is; not state of a worker.
EXPORTED: Final[dict[Key, Callable[..., Any]]] = {}
"""Functions and classes that peers may call, and a pickle may name if its sender's role allows it."""
QUICK: Final[dict[Key, Any]] = {}
"""Objects that the reader in C finds, too: `Checked` functions whose results have no state, and immutable objects."""
NAMES: Final[dict[Key, Any]] = {}
"""Objects for the careful reader only: `Checked` functions, and objects that a pickle may name but not call."""
CLASSES: Final = _Classes()
"""Registered classes: the careful reader makes instances of them, see `wire.values.registered_classes`."""
TENSOR_CLASSES: Final = _Classes()
"""Registered subclasses of Tensor. A pickle may name but not call them: a call returns uninitialized memory."""
MAKERS: Final[dict[int, Checked]] = {}
"""The functions that make an instance when a pickle calls a class of `NAMES`, by the id of the class."""

_MAX_SHOWN: Final = 200
_NOT_DATA: Final = (type, np.ndarray, np.generic, np.dtype, memoryview, torch.UntypedStorage, torch.TypedStorage)


def key_of(obj: Any) -> Key:
    """Return the name of an object in pickles. Raises `ConfigurationError` for an object that peers cannot name."""
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
    """Let peers call a function in allow-list mode (``RpcOptions(allow="exported")``). Other modes ignore this.

    If a class is exported, peers may make instances and call the public methods that it defines itself, through RRefs.
    Functions of other libraries can be exported too: ``arpc.export(torch.add)``. Raises `TypeError` for an object that
    is not callable, `ConfigurationError` for one that has no name in a module.

    >>> @export
    ... async def add(a: int, b: int) -> int:
    ...     return a + b
    """
    if not callable(function):
        raise TypeError(f"export is for what can be called, and {type(function).__qualname__} cannot")
    EXPORTED[key_of(function)] = function
    return function


def register_type(cls: C) -> C:
    """Let messages contain instances of a class in allow-list mode. Other modes ignore this.

    A peer may call the class with any arguments, and set any attribute of the instance, except methods and names with
    two underscores on both sides. A ``__setstate__`` that the class defines is called with any state. So register plain
    data (dataclasses, named tuples, enums, exceptions, subclasses of Tensor), and no class that opens files or executes
    its arguments. A subclass of Tensor is never called: its instances are made from tensors of the message. Raises
    `TypeError` for an object that is no such class.

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
    """Let pickles call a function of the runtime while they are read, with arguments that pass ``checks``."""

    def add(function: T) -> T:
        NAMES[key_of(function)] = Checked(function.__qualname__, function, *checks, required=required)
        return function

    return add


def add_maker(key: Key, cls: type, maker: Checked) -> None:
    """Let pickles name a class that is not registered, and make its instances by ``maker``, which checks arguments."""
    NAMES[key] = cls
    MAKERS[id(cls)] = maker


def shown(key: Key) -> str:
    """Return a name that a peer has chosen in a form for errors and logs: on one line, and not long."""
    name = ".".join(key)
    return name if len(name) <= _MAX_SHOWN and name.isprintable() else ascii(name[:_MAX_SHOWN])


def callable_named(key: Key) -> Callable[..., Any]:
    """Return the exported function of that name. Raises `NotAllowedError` if there is none."""
    found = EXPORTED.get(key)
    if found is None:
        raise NotAllowedError(
            f"{shown(key)} is not exported here: mark it with @arpc.export, in a module that this worker imports"
        )
    return found


def may_call_method(cls: type, name: str) -> bool:
    """Whether peers may call a method of an instance of ``cls``.

    They may if the method is exported, or if it is public and defined by an exported class. An instance of an exported
    class can itself be called, whichever class defines ``__call__``.
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
    """Return a module's name in pickles: the script's is ``__main__``, even if multiprocessing has started it."""
    return "__main__" if module in MAIN_NAMES else module
