"""What may be called and what may be built here, for workers that do not trust the pickles of others.

A pickle is a program: it names functions and classes of any module, and calls them. In allow-list mode it names what is
in the lists of this module and nothing else. No module is imported for it and no attribute looked up. See
`wire.restricted` for how the lists are kept to.
"""

from __future__ import annotations

import builtins
import datetime as dt
import decimal
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import BuiltinFunctionType, MethodDescriptorType, MethodType
from typing import Any, Final, TypeVar

import torch

from arpc import errors, ids, options
from arpc.errors import ConfigurationError, NotAllowedError
from arpc.wire.reducing import MAIN_NAMES, importable_name

__all__ = ["Inert", "Key", "callable_named", "export", "key_of", "may_call_method", "register_type", "trust"]

T = TypeVar("T", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

Key = tuple[str, str]
"""Module and qualified name, as a pickle says them."""

_MAX_DIMENSIONS: Final = 64


class Inert:
    """A callable of the runtime in a form that a pickle can call, and do nothing else to: it has no attributes."""

    __slots__ = ("_call",)
    _call: Callable[..., Any]

    def __init__(self, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_call", call)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name!r} cannot be set")


class Names:
    """Objects by the names that pickles have for them."""

    def __init__(self) -> None:
        self._by_key: dict[Key, Any] = {}
        self._ids: set[int] = set()
        self.get = self._by_key.get

    def __contains__(self, obj: object) -> bool:
        """Whether this very object is among them; what it takes itself to be equal to does not matter."""
        return id(obj) in self._ids

    def add(self, key: Key, obj: Any) -> None:
        self._by_key[key] = obj
        self._ids.add(id(obj))  # which is kept here, so that no other can have that id


# These are declarations about code, made where the code is; not state of a worker.
_exported: dict[Key, Callable[..., Any]] = {}
HARMLESS: Final = Names()
"""What a pickle may name and call at any time: nothing of it can be changed, and calling it has no effect."""
CONSTRUCTORS: Final = Names()
"""What a pickle may call besides, if each of its steps is looked at: classes, which can be changed."""
VALUES: Final = Names()
"""What a pickle may name and not call."""


def key_of(obj: Any) -> Key:
    """How pickles name something. Raises `ConfigurationError` for what others cannot name."""
    module, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    if isinstance(obj, BuiltinFunctionType | MethodDescriptorType):
        found = importable_name(obj)
        if found is None:
            raise ConfigurationError(f"{obj!r} has no name by which others could call it")
        return found
    if isinstance(obj, torch.jit.ScriptFunction | torch._C.ScriptMethod):
        # its module and name are those of its class
        raise ConfigurationError(
            f"{obj.name} is compiled by TorchScript, and has no name by which others could call it in allow-list mode: "
            f"export a plain function that calls it"
        )
    if not isinstance(module, str) or not isinstance(name, str) or "<" in name or isinstance(obj, MethodType):
        raise ConfigurationError(f"{obj!r} has no name by which others could call it: define it in a module")
    return ("__main__" if module in MAIN_NAMES else module), name


def export(function: T) -> T:
    """Let others call a function in allow-list mode (``RpcOptions(allow="exported")``); without that it means nothing.

    Of a class, others may make instances and call the public methods that it defines itself, through RRefs. It can be
    applied to what is not yours, too: ``arpc.export(torch.add)``.

    >>> @export
    ... async def add(a: int, b: int) -> int:
    ...     return a + b
    """
    if not callable(function):
        raise TypeError(f"export is for what can be called, and {type(function).__qualname__} cannot")
    _exported[key_of(function)] = function
    return function


def register_type(cls: C) -> C:
    """Let instances of a class travel in allow-list mode; without that it means nothing.

    Who may send one may call the class with any arguments and set any attribute of the instance: register plain data
    (dataclasses, named tuples, enums, exceptions), and no class that opens files or runs what it is given.

    >>> @register_type
    ... class Point(tuple):
    ...     pass
    """
    if not isinstance(cls, type):
        raise TypeError(f"register_type is for classes, and {cls!r} is none")
    CONSTRUCTORS.add(key_of(cls), cls)
    return cls


def trust(function: T) -> T:
    """Let pickles call a function of the runtime while they are read, with any arguments."""
    CONSTRUCTORS.add(key_of(function), Inert(function))
    return function


def callable_named(key: Key) -> Callable[..., Any]:
    """The exported function of that name. Raises `NotAllowedError`."""
    found = _exported.get(key)
    if found is None:
        raise NotAllowedError(
            f"{'.'.join(key)} is not exported here: mark it with @arpc.export, in a module that this worker imports"
        )
    return found


def is_exported(key: Key) -> bool:
    return key in _exported


def may_call_method(cls: type, name: str) -> bool:
    """Whether others may call a method of an instance.

    They may if it is exported, or public and of an exported class that defines it. An instance of an exported class can
    be called itself, whoever defines how.
    """
    if name == "__call__":
        return _is_exported_class(cls)
    for base in cls.__mro__:
        if name in vars(base):
            module = "__main__" if base.__module__ in MAIN_NAMES else base.__module__
            is_public = not name.startswith("_")
            return (module, f"{base.__qualname__}.{name}") in _exported or (is_public and _is_exported_class(base))
    return False


def _is_exported_class(cls: type) -> bool:
    module = "__main__" if cls.__module__ in MAIN_NAMES else cls.__module__
    return _exported.get((module, cls.__qualname__)) is cls


# -- what is in the lists from the start


def _size(sizes: Any) -> torch.Size:
    if type(sizes) is not tuple or len(sizes) > _MAX_DIMENSIONS:
        raise NotAllowedError("a torch.Size is made of a tuple")  # of a range it would take any amount of memory
    return torch.Size(sizes)


def _deque(items: Any = (), limit: int | None = None) -> deque[Any]:
    if type(items) is not tuple or items:
        raise NotAllowedError("a deque is filled item by item")
    return deque(maxlen=limit)


def _counter(counts: Any) -> Counter[Any]:
    if type(counts) is not dict:
        raise NotAllowedError("a Counter is made of a dict")
    return Counter(counts)


def _default_dict(factory: Any = None) -> defaultdict[Any, Any]:
    if factory is not None and not any(factory is kind for kind in _FACTORIES):
        raise NotAllowedError("a defaultdict makes numbers, strings or containers")
    return defaultdict(factory)


def _layout(name: Any) -> torch.layout:
    return _LAYOUTS[name]


_IMMUTABLE: Final = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE
_FACTORIES: Final = (int, float, str, bool, bytes, list, dict, set, tuple)
_LAYOUTS: Final = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}


def _fill_lists() -> None:
    for module, name, harmless in (
        ("torch", "Size", Inert(_size)),
        ("torch", "device", Inert(torch.device)),
        ("torch.serialization", "_get_layout", Inert(_layout)),
        ("builtins", "complex", complex),
        ("builtins", "range", range),
        ("builtins", "slice", slice),
        ("collections", "OrderedDict", Inert(OrderedDict)),
        ("collections", "deque", Inert(_deque)),
        ("decimal", "Decimal", Inert(decimal.Decimal)),
    ):
        HARMLESS.add((module, name), harmless)
    for value in vars(torch).values():
        if isinstance(value, torch.dtype):
            HARMLESS.add(("torch", str(value).removeprefix("torch.")), value)
    kind: type
    for kind in (dt.date, dt.time, dt.datetime, dt.timedelta, dt.timezone):
        HARMLESS.add(("datetime", kind.__name__), Inert(kind))
    for name, value in vars(builtins).items():
        if isinstance(value, type) and issubclass(value, BaseException):
            names = HARMLESS if value.__flags__ & _IMMUTABLE else CONSTRUCTORS
            names.add(("builtins", value.__name__), value)
            names.add(("builtins", name), value)
    CONSTRUCTORS.add(("collections", "Counter"), Inert(_counter))
    CONSTRUCTORS.add(("collections", "defaultdict"), Inert(_default_dict))
    for kind in (ids.WorkerInfo, ids.GloballyUniqueId, torch.OutOfMemoryError, torch._C._LinAlgError):  # type: ignore[attr-defined] # noqa: SLF001
        register_type(kind)
    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, BaseException) and error.__module__ == errors.__name__:
            register_type(error)
    for kind in (*_FACTORIES, frozenset, bytearray, object):
        VALUES.add(("builtins", kind.__name__), kind)
    VALUES.add(("torch", "Tensor"), torch.Tensor)
    VALUES.add(("arpc.options", "UNSET"), options.UNSET)


_fill_lists()
trust(errors._rebuild_worker_lost)  # noqa: SLF001 - what its class names in pickles
