"""The types of TorchScript: from their text and back, and the classes of Python that stand for them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch._C import _jit_tree_views
from torch.jit import _state
from torch.jit._recursive import wrap_cpp_module
from torch.jit.annotations import try_ann_to_type

from arpc.errors import ScriptError

__all__ = ["contents_of", "parse_type", "python_class", "text_of", "to_python"]

_SIMPLE: Final[dict[str, Callable[[], Any]]] = {
    "Any": torch._C.AnyType.get,
    "Device": torch._C.DeviceObjType.get,
    "NoneType": torch._C.NoneType.get,
    "None": torch._C.NoneType.get,
    "Stream": torch._C.StreamObjType.get,
    "Tensor": torch._C.TensorType.get,
    "bool": torch._C.BoolType.get,
    "complex": torch._C.ComplexType.get,
    "float": torch._C.FloatType.get,
    "int": torch._C.IntType.get,
    "number": torch._C.NumberType.get,
    "str": torch._C.StringType.get,
}
_GENERIC: Final[dict[str, tuple[int, Callable[..., Any]]]] = {
    "Dict": (2, torch._C.DictType),
    "Future": (1, torch._C.FutureType),
    "List": (1, torch._C.ListType),
    "Optional": (1, torch._C.OptionalType),
    "RRef": (1, torch._C.RRefType),
}
_SERIES: Final[dict[str, Callable[..., Any]]] = {"Tuple": torch._C.TupleType, "Union": torch._C.UnionType}
_TOKEN: Final = re.compile(r"\s*([A-Za-z_][\w.]*|[\[\],()])")
_MANGLED: Final = re.compile(r"___torch_mangle_\d+\.")


def text_of(type_: Any) -> str:
    """A type as people write it, such as ``Dict[str, List[int]]``; `parse_type` reads it."""
    return str(type_.annotation_str)


def parse_type(text: str) -> Any:
    """The type of TorchScript that `text_of` wrote. Raises `ScriptError` if there is none like that.

    >>> parse_type("Optional[List[int]]").annotation_str
    'Optional[List[int]]'

    Classes, interfaces and NamedTuples are those that this process has compiled under that name.
    """
    return _Parser(text).parse()


class _Parser:
    """Reads one text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0

    def parse(self) -> Any:
        parsed = self._type()
        if self._text[self._place :].strip():
            raise self._complaint("ends too early")
        return parsed

    def _type(self) -> Any:
        name = self._next()
        if name in _SIMPLE:
            return _SIMPLE[name]()
        if name in _GENERIC:
            count, make = _GENERIC[name]
            parts = self._parts()
            if len(parts) != count:
                raise self._complaint(f"gives {name} {len(parts)} types and not {count}")
            return make(*parts)
        if name in _SERIES:
            return _SERIES[name](self._parts())
        if name.startswith("__torch__."):
            return self._named(name)
        raise self._complaint(f"names {name!r}, which is unknown")

    def _parts(self) -> list[Any]:
        self._expect("[")
        if self._peek() == "(":  # of a tuple that has none
            self._expect("(")
            self._expect(")")
            self._expect("]")
            return []
        parts = [self._type()]
        while (mark := self._next()) == ",":
            parts.append(self._type())
        if mark != "]":
            raise self._complaint("misses a bracket")
        return parts

    def _named(self, name: str) -> Any:
        unit: Any = _state._python_cu  # noqa: SLF001 - where torch keeps what it has compiled
        found = unit.get_class(name) or unit.get_interface(name)
        if found is None and (cls := python_class(name)) is not None:
            found = try_ann_to_type(cls, _NOWHERE)  # type: ignore[no-untyped-call]
        if found is None:
            raise self._complaint(f"names {name!r}, which this process has not compiled: import its module first")
        return found

    def _peek(self) -> str:
        match = _TOKEN.match(self._text, self._place)
        return match.group(1) if match else ""

    def _next(self) -> str:
        match = _TOKEN.match(self._text, self._place)
        if match is None:
            raise self._complaint("ends too early")
        self._place = match.end()
        return match.group(1)

    def _expect(self, token: str) -> None:
        if self._next() != token:
            raise self._complaint(f"misses a {token!r}")

    def _complaint(self, what: str) -> ScriptError:
        return ScriptError(f"{self._text!r} is no type of TorchScript: it {what}")


_NOWHERE: Final = _jit_tree_views.SourceRangeFactory("", None, 0, 0).make_raw_range(0, 1)


def python_class(qualified_name: str) -> type | None:
    """The class that TorchScript calls ``__torch__.module.Name``, if a module that is loaded here has it."""
    names = _MANGLED.sub("", qualified_name).split(".")[1:]
    for length in range(len(names) - 1, -1, -1):
        found: Any = sys.modules.get(".".join(names[:length]) or "__main__")
        for name in names[length:]:
            found = getattr(found, name, None)
        if isinstance(found, type):
            return found
    return None


def contents_of(type_: Any) -> list[Any]:
    """The types that a type is made of."""
    return [] if type_.kind() in {"ClassType", "InterfaceType"} else list(type_.containedTypes())


def to_python(type_: Any) -> Callable[[Any], Any] | None:
    """What makes a value as the user knows it out of what torch returns; None if that is the same.

    For a NamedTuple, torch makes a class of its own each time. A module comes without the methods of Python's.
    """
    kind = type_.kind()
    if kind in {"ClassType", "InterfaceType"}:
        return _wrapped
    inner = [to_python(part) for part in contents_of(type_)]
    named = python_class(text_of(type_)) if kind == "TupleType" and text_of(type_).startswith("__torch__.") else None
    if named is None and not any(inner):
        return None
    makers = [_same if make is None else make for make in inner]
    if kind == "TupleType":
        make_tuple: Callable[..., Any] = tuple if named is None else getattr(named, "_make", tuple)
        return lambda value: make_tuple([make(item) for make, item in zip(makers, value, strict=True)])
    if kind == "ListType":
        return lambda value: [makers[0](item) for item in value]
    if kind == "DictType":
        return lambda value: {makers[0](key): makers[1](item) for key, item in value.items()}
    if kind == "OptionalType":
        return lambda value: None if value is None else makers[0](value)
    if kind == "FutureType":
        return lambda value: value.then(lambda done: makers[0](done.value()))
    return None


def _wrapped(value: Any) -> Any:
    return wrap_cpp_module(value) if isinstance(value, torch._C.ScriptModule) else value  # type: ignore[no-untyped-call]


def _same(value: Any) -> Any:
    return value
