"""Inspect exceptions and results of user code without letting their own code interfere.

A user's class may define anything: a ``__str__`` that raises, a ``__cause__`` that ends the process, a metaclass that
hides its name. The runtime has to describe, copy and chain such objects all the same, often in a callback of the event
loop, where an escaping exception would end the worker. So all code that handles an exception of user code uses these
functions. None of them raises, and those that must run user code (`text_of`, `repr_of`, `stack_of`, `fresh`) have a
fallback.

``isinstance(error, kind)`` is not safe: if the type does not match, it reads the object's ``__class__``. Use `is_a`, or
an ``except`` clause, which checks the type alone.
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
"""The most characters of a message, or of a stack, that are reported; the middle of a longer one is left out."""

# The interpreter's own fields, which a class cannot replace
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

# Most results have one of these types, and a check against an abstract class is slow if it does not match
_PLAIN: Final = frozenset((NoneType, bool, int, float, str, bytes, tuple, list, dict))

# With these a class changes the result of ``isinstance`` for its objects, and a metaclass even the effect of ``raise``
_OF_CLASS: Final = ("__class__", "__getattribute__")
_OF_METACLASS: Final = ("__getattribute__", "__instancecheck__", "__subclasscheck__")


def is_a(value: object, kinds: type | tuple[type, ...]) -> bool:
    """Like ``isinstance``, but by the type alone. Not for abstract classes, which query the type of the value."""
    return issubclass(type(value), kinds)


def is_coroutine(value: object) -> bool:
    """Return whether a value is a coroutine of any kind, which must be awaited."""
    kind = type(value)
    try:
        return kind is CoroutineType or (kind not in _PLAIN and issubclass(kind, Coroutine))
    except BaseException:  # noqa: BLE001 - it runs a metaclass, which may raise anything
        return False


def close_coroutine(value: Any) -> None:
    """Close a value if it is a coroutine. Exceptions that its blocks raise are dropped."""
    if is_coroutine(value):
        with suppress(BaseException):
            value.close()


def can_be_raised(value: object) -> bool:
    """Return whether a value is an exception that code can catch and inspect like any other."""
    kind = type(value)
    return (
        issubclass(kind, BaseException)
        and not _defines(kind, _OF_CLASS, (BaseException, object))
        and not _defines(type(kind), _OF_METACLASS, (ABCMeta, type, object))
    )


def _defines(cls: type, names: tuple[str, ...], known: tuple[type, ...]) -> bool:
    """Return whether a class defines one of the names, or inherits it from a class that is not in ``known``."""
    namespaces = [_get_namespace(base) for base in _get_mro(cls) if not any(base is one for one in known)]
    # a class written in C may repeat the slots that it inherits
    return any(
        name in namespace and type(namespace[name]) is not WrapperDescriptorType
        for namespace in namespaces
        for name in names
    )


def class_name_of(value: object) -> str:
    """Return the bare name of a value's type, without the scope in which it was defined."""
    return _exact(_get_name(type(value)))


def type_name_of(value: object, *, with_module: bool = False) -> str:
    """Return the qualified name of a value's type."""
    return name_of_class(type(value), with_module=with_module)


def name_of_class(cls: type, *, with_module: bool = False) -> str:
    """Return the qualified name of a class, without running its metaclass."""
    name: str = _exact(_get_qualname(cls))
    module = _get_module(cls) if with_module else "builtins"
    return name if type(module) is not str or module == "builtins" else f"{module}.{name}"


def text_of(error: BaseException, limit: int = MAX_TEXT) -> str:
    """Return the message of an exception, or as much of it as is available."""
    try:
        return _cut(_exact(str(error)), limit)
    except BaseException as reason:  # noqa: BLE001 - a user's __str__ may raise anything
        complaint = f"<its __str__ raised {type_name_of(reason)}>"
    try:
        # the interpreter's own text for the arguments
        plain = _cut(_exact(BaseException.__str__(error)), limit)
    except BaseException:  # noqa: BLE001 - the arguments may be a user's too
        return complaint
    return f"{complaint} {plain}" if plain else complaint


def repr_of(error: BaseException) -> str:
    """Return the ``repr`` of an exception, or its type and message if that raises."""
    try:
        return _cut(_exact(repr(error)), MAX_TEXT)
    except BaseException:  # noqa: BLE001 - a user's __repr__ may raise anything
        return f"{type_name_of(error)}({text_of(error)!r})"


def summary_of(error: BaseException) -> str:
    """Return the type and message of an exception, for the text of another one."""
    text = text_of(error)
    return f"{type_name_of(error)}: {text}" if text else type_name_of(error)


def stack_of(error: BaseException, limit: int = MAX_TEXT) -> str:
    """Format an exception as Python would print it: its frames, its causes and its message."""
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
    """Return the traceback that the interpreter has for an exception."""
    trace: TracebackType | None = _get_traceback(error)
    return trace


def with_traceback(error: E, trace: TracebackType | None) -> E:
    """Set the traceback of an exception, and return the exception itself."""
    return _with_traceback(error, trace)


def cause_of(error: BaseException) -> BaseException | None:
    """Return the cause that the interpreter has for an exception."""
    cause: BaseException | None = _get_cause(error)
    return cause


def set_cause(error: E, cause: BaseException | None) -> E:
    """Set the cause of an exception, and return the exception itself."""
    _set_cause(error, cause)
    return error


def fresh(error: E) -> E:
    """Return a copy of an error to raise. A kept error that is raised again collects the frames of every raise.

    An exception that cannot be copied is returned itself.
    """
    try:
        made = copy.copy(error)
    except BaseException:  # noqa: BLE001 - a user's __reduce__ may raise anything
        return error
    if type(made) is not type(error):
        return error
    if is_a(error, ArpcError):
        set_may_have_run(made, error.may_have_run)  # type: ignore[attr-defined]  # a copy loses the mark
    return set_cause(made, _get_cause(error))
