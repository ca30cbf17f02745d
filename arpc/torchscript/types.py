"""The types of TorchScript: parsing and formatting them, and the Python classes that they stand for."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, Final

import torch

from arpc import torchjit
from arpc.errors import ScriptError

__all__ = ["contents_of", "parse_type", "python_class", "text_of", "to_python"]

_SIMPLE: Final[dict[str, str]] = {
    "Any": "AnyType",
    "Device": "DeviceObjType",
    "NoneType": "NoneType",
    "None": "NoneType",
    "Stream": "StreamObjType",
    "Tensor": "TensorType",
    "bool": "BoolType",
    "complex": "ComplexType",
    "float": "FloatType",
    "int": "IntType",
    "number": "NumberType",
    "str": "StringType",
}
"""The classes of ``torch._C`` that have one instance, by the names of their types."""
_GENERIC: Final[dict[str, tuple[int, str]]] = {
    "Dict": (2, "DictType"),
    "Future": (1, "FutureType"),
    "List": (1, "ListType"),
    "Optional": (1, "OptionalType"),
    "RRef": (1, "RRefType"),
}
_SERIES: Final[dict[str, str]] = {"Tuple": "TupleType", "Union": "UnionType"}
_TOKEN: Final = re.compile(r"\s*([A-Za-z_][\w.]*|[\[\],()])")
_MANGLED: Final = re.compile(r"___torch_mangle_\d+\.")


def text_of(type_: torch._C.JitType) -> str:
    """Return the text of a type as in annotations, such as ``Dict[str, List[int]]``; `parse_type` reads it."""
    return str(type_.annotation_str)


def parse_type(text: str) -> torch._C.JitType:
    """Return the TorchScript type with this text, as written by `text_of`. Raises `ScriptError` if there is none.

    >>> parse_type("Optional[List[int]]").annotation_str
    'Optional[List[int]]'

    Classes, interfaces and NamedTuples are those that this process has compiled under that name. Raises
    `UnsupportedError` where torch has no TorchScript.
    """
    torchjit.require()
    found: torch._C.JitType = _Parser(text).parse()
    return found


class _Parser:
    """Parses one text."""

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
            return getattr(torch._C, _SIMPLE[name]).get()
        if name in _GENERIC:
            count, make = _GENERIC[name]
            parts = self._parts()
            if len(parts) != count:
                raise self._complaint(f"gives {name} {len(parts)} types and not {count}")
            return getattr(torch._C, make)(*parts)
        if name in _SERIES:
            return getattr(torch._C, _SERIES[name])(self._parts())
        if name.startswith("__torch__."):
            return self._named(name)
        raise self._complaint(f"names {name!r}, which is unknown")

    def _parts(self) -> list[Any]:
        self._expect("[")
        if self._peek() == "(":  # an empty tuple
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
        unit = torchjit.compiled_unit()
        found = unit.get_class(name) or unit.get_interface(name)
        if found is None and (cls := python_class(name)) is not None:
            found = torchjit.type_of(cls)
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


def python_class(qualified_name: str) -> type | None:
    """Return the class that TorchScript calls ``__torch__.module.Name``; None if no loaded module has it."""
    names = _MANGLED.sub("", qualified_name).split(".")[1:]
    for length in range(len(names) - 1, -1, -1):
        found: Any = sys.modules.get(".".join(names[:length]) or "__main__")
        for name in names[length:]:
            found = getattr(found, name, None)
        if isinstance(found, type):
            return found
    return None


def contents_of(type_: Any) -> list[Any]:
    """Return the types that a type is made of."""
    return [] if type_.kind() in {"ClassType", "InterfaceType"} else list(type_.containedTypes())


def to_python(type_: Any) -> Callable[[Any], Any] | None:
    """Return a function that converts torch's results of a type to the user's classes; None if none is needed.

    For a NamedTuple, torch makes a class of its own each time. A module is returned without its Python methods.
    """
    kind = type_.kind()
    if kind in {"ClassType", "InterfaceType"}:
        return torchjit.wrap_module
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


def _same(value: Any) -> Any:
    return value
