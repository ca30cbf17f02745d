"""Exceptions and results of user code, looked at without letting their own code interfere.

A class of a user may define anything: a ``__str__`` that raises, a ``__cause__`` that ends the process, a metaclass
that does not tell its name. The runtime has to describe such objects, copy them and chain them all the same, and often
in a callback of the event loop, where whatever escapes would end the worker. So all code that handles an exception of
user code goes through these functions. None of them raises, and those that must run code of the user (`text_of`,
`stack_of`, `fresh`) have a fallback.

``isinstance(error, kind)`` is not safe: if the type does not match, it asks the object for its ``__class__``. Use
`is_a`, or an ``except`` clause, which looks at the type alone.
"""

from __future__ import annotations

import copy
import traceback
from abc import ABCMeta
from collections.abc import Coroutine
from contextlib import suppress
from types import CoroutineType, NoneType, TracebackType, WrapperDescriptorType
from typing import Any, Final, TypeVar

from arpc.errors import ArpcError, set_may_have_run

__all__ = [
    "can_be_raised",
    "cause_of",
    "class_name_of",
    "close_coroutine",
    "fresh",
    "is_a",
    "is_coroutine",
    "repr_of",
    "set_cause",
    "stack_of",
    "summary_of",
    "text_of",
    "traceback_of",
    "type_name_of",
    "with_traceback",
]

E = TypeVar("E", bound=BaseException)

MAX_TEXT: Final = 1 << 16
"""How many characters of a message, or of a stack, are told; the middle of a longer one is left out."""

# The fields of the interpreter itself, whatever a class puts in front of them
_get_name = type.__dict__["__name__"].__get__
_get_qualname = type.__dict__["__qualname__"].__get__
_get_module = type.__dict__["__module__"].__get__
_get_mro = type.__dict__["__mro__"].__get__
_get_namespace = type.__dict__["__dict__"].__get__
_get_cause = BaseException.__dict__["__cause__"].__get__
_set_cause = BaseException.__dict__["__cause__"].__set__
_get_traceback = BaseException.__dict__["__traceback__"].__get__
_with_traceback = BaseException.with_traceback
_exact = str.__str__

# Most results are one of these, and an abstract class takes its time to tell what is not one of its own
_PLAIN: Final = frozenset((NoneType, bool, int, float, str, bytes, tuple, list, dict))

# With these a class decides what ``isinstance`` says of its objects, and a metaclass even what ``raise`` does
_OF_CLASS: Final = ("__class__", "__getattribute__")
_OF_METACLASS: Final = ("__getattribute__", "__instancecheck__", "__subclasscheck__")


def is_a(value: object, kinds: type | tuple[type, ...]) -> bool:
    """``isinstance`` by the type alone. Not for abstract classes, which ask the type of the value."""
    return issubclass(type(value), kinds)


def is_coroutine(value: object) -> bool:
    """Whether a value is to be awaited because it is a coroutine, of any kind."""
    kind = type(value)
    try:
        return kind is CoroutineType or (kind not in _PLAIN and issubclass(kind, Coroutine))
    except BaseException:  # noqa: BLE001 - it asks a metaclass, which may raise anything
        return False


def close_coroutine(value: Any) -> None:
    """Close a value if it is a coroutine. What its blocks raise is nobody's."""
    if is_coroutine(value):
        with suppress(BaseException):
            value.close()


def can_be_raised(value: object) -> bool:
    """Whether a value is an exception that code may catch and look at as it looks at any other."""
    kind = type(value)
    return (
        issubclass(kind, BaseException)
        and not _defines(kind, _OF_CLASS, (BaseException, object))
        and not _defines(type(kind), _OF_METACLASS, (ABCMeta, type, object))
    )


def _defines(cls: type, names: tuple[str, ...], known: tuple[type, ...]) -> bool:
    """Whether a class defines one of the names, or inherits it from one that is not known."""
    namespaces = [_get_namespace(base) for base in _get_mro(cls) if not any(base is one for one in known)]
    # a class written in C may repeat what it inherits
    return any(
        name in namespace and type(namespace[name]) is not WrapperDescriptorType
        for namespace in namespaces
        for name in names
    )


def class_name_of(value: object) -> str:
    """The name of a value's type alone, without that of the place where it was defined."""
    return _exact(_get_name(type(value)))


def type_name_of(value: object, *, with_module: bool = False) -> str:
    """The qualified name of a value's type."""
    return name_of_class(type(value), with_module=with_module)


def name_of_class(cls: type, *, with_module: bool = False) -> str:
    """The qualified name of a class, whatever its metaclass says."""
    name: str = _exact(_get_qualname(cls))
    module = _get_module(cls) if with_module else "builtins"
    return name if type(module) is not str or module == "builtins" else f"{module}.{name}"


def text_of(error: BaseException, limit: int = MAX_TEXT) -> str:
    """The message of an exception, or as much of it as can be had."""
    try:
        return _cut(_exact(str(error)), limit)
    except BaseException as reason:  # noqa: BLE001 - a user's __str__ may raise anything
        complaint = f"<its __str__ raised {type_name_of(reason)}>"
    try:
        # what the interpreter makes of the arguments, whatever the class makes of them
        plain = _cut(_exact(BaseException.__str__(error)), limit)
    except BaseException:  # noqa: BLE001 - the arguments may be a user's too
        return complaint
    return f"{complaint} {plain}" if plain else complaint


def repr_of(error: BaseException) -> str:
    """``repr`` of an exception, or its type and message."""
    try:
        return _cut(_exact(repr(error)), MAX_TEXT)
    except BaseException:  # noqa: BLE001 - a user's __repr__ may raise anything
        return f"{type_name_of(error)}({text_of(error)!r})"


def summary_of(error: BaseException) -> str:
    """Type and message of an exception in one line, for the text of another one."""
    text = text_of(error)
    return f"{type_name_of(error)}: {text}" if text else type_name_of(error)


def stack_of(error: BaseException, limit: int = MAX_TEXT) -> str:
    """An exception as Python would print it: its frames, its causes and its message."""
    with suppress(BaseException):  # causes, notes and attributes are a user's too
        return _cut(_exact("".join(traceback.format_exception(error))), limit)
    try:
        frames = "".join(traceback.format_tb(_get_traceback(error)))
    except BaseException:  # noqa: BLE001 - lines of source code come from the loader of their module
        frames = ""
    head = f"Traceback (most recent call last):\n{frames}" if frames else ""
    return _cut(f"{head}{_summary_with_module(error)}\n", limit)


def _summary_with_module(error: BaseException) -> str:
    text, name = text_of(error), type_name_of(error, with_module=True)
    return f"{name}: {text}" if text else name


def _cut(text: str, limit: int) -> str:
    excess = len(text) - limit
    if excess <= 0:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {excess} characters are left out ...\n{text[-half:]}"


def traceback_of(error: BaseException) -> TracebackType | None:
    """The traceback that the interpreter has for an exception."""
    trace: TracebackType | None = _get_traceback(error)
    return trace


def with_traceback(error: E, trace: TracebackType | None) -> E:
    """The exception itself, with another traceback."""
    return _with_traceback(error, trace)


def cause_of(error: BaseException) -> BaseException | None:
    """The cause that the interpreter has for an exception."""
    cause: BaseException | None = _get_cause(error)
    return cause


def set_cause(error: E, cause: BaseException | None) -> E:
    """The exception itself, chained to its cause."""
    _set_cause(error, cause)
    return error


def fresh(error: E) -> E:
    """A copy of an error to raise. One that is kept would collect the frames of all who raise it.

    An exception that cannot be copied is returned itself.
    """
    try:
        made = copy.copy(error)
    except BaseException:  # noqa: BLE001 - a user's __reduce__ may raise anything
        return error
    if type(made) is not type(error):
        return error
    if is_a(error, ArpcError):
        set_may_have_run(made, error.may_have_run)  # type: ignore[attr-defined]  # which a copy would not say
    return set_cause(made, _get_cause(error))
