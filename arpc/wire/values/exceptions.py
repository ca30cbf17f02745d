"""Exceptions that a pickle may make: those of Python and arpc, without values that break native code.

CPython formats some exceptions by numbers in them that it does not check: ``UnicodeDecodeError`` reads the byte at
``start``, wherever that is. So an exception is checked before any other code gets it. Exceptions that would end an
event loop or a process if they were raised (`SystemExit` and its like) are on no list.
"""

from __future__ import annotations

import builtins
from typing import Any, Final

import torch

from arpc import errors
from arpc.errors import NotAllowedError
from arpc.wire.values.allowlist import add_maker, allow_function
from arpc.wire.values.checked_functions import ANYTHING, SCALARS, TEXT, Check, Checked, is_plain

__all__ = ["check_arguments", "check_exception", "set_native_attribute"]

_MAX_COLUMN: Final = 1 << 20
"""The most characters of a SyntaxError's texts, and its largest line or column: as many are printed to mark a place."""
_MAX_MEMBERS: Final = 100_000
_SYNTAX_NUMBERS: Final = ("lineno", "offset", "end_lineno", "end_offset")
_SYNTAX_TEXTS: Final = ("msg", "filename", "text")
_NATIVE: Final[dict[type, tuple[str, ...]]] = {
    ImportError: ("name", "path"),
    AttributeError: ("name",),
    NameError: ("name",),
}
"""Attributes that native code keeps outside of ``__dict__``, and pickles as a state. They are texts, or None."""


def check_arguments(cls: type[BaseException], args: tuple[Any, ...]) -> None:
    """Check the arguments of a constructor in native code, which makes a tuple of any iterable, however long.

    Raises `NotAllowedError`.
    """
    if issubclass(cls, BaseExceptionGroup):
        _check_group(args)
    elif issubclass(cls, UnicodeError | SyntaxError | OSError) and not all(map(is_plain, args)):
        raise NotAllowedError(f"a message with a {cls.__qualname__} that is not made of numbers and texts")


def _check_group(args: tuple[Any, ...]) -> None:
    match args:
        case [str(), list() | tuple() as members] if len(members) <= _MAX_MEMBERS:
            if all(isinstance(member, BaseException) for member in members):
                return
    raise NotAllowedError("a message with an exception group that is not made of a text and a list of exceptions")


def check_exception(made: BaseException) -> None:
    """Refuse an exception that would mislead native code, or the printing of a traceback. Raises `NotAllowedError`."""
    if isinstance(made, UnicodeDecodeError | UnicodeEncodeError | UnicodeTranslateError):
        _check_unicode(made)
    elif isinstance(made, SyntaxError):
        _check_syntax(made)
    elif isinstance(made, OSError):
        if not all(type(value) in SCALARS for value in (*made.args, made.errno, made.filename, made.filename2)):
            raise _refused(made)
    elif isinstance(made, BaseExceptionGroup) and type(made.message) is not str:
        raise _refused(made)
    notes = vars(made).get("__notes__", [])
    if type(notes) is not list or not all(type(note) is str for note in notes):
        raise _refused(made)


def _check_unicode(made: UnicodeDecodeError | UnicodeEncodeError | UnicodeTranslateError) -> None:
    kind = bytes if isinstance(made, UnicodeDecodeError) else str
    try:
        texts = (made.reason,) if isinstance(made, UnicodeTranslateError) else (made.encoding, made.reason)
        # `args` has the numbers as they were given; the attributes may be clamped
        content, numbers = made.object, (*made.args[-3:-1], made.start, made.end)
    except (TypeError, AttributeError):
        raise _refused(made) from None  # it was made by `__new__` and not initialized
    if type(content) is not kind or not all(type(text) is str for text in texts):
        raise _refused(made)
    if not all(type(number) is int and 0 <= number <= len(content) for number in numbers) or made.start > made.end:
        raise _refused(made)


def _check_syntax(made: SyntaxError) -> None:
    numbers = [getattr(made, name) for name in _SYNTAX_NUMBERS]
    texts = [getattr(made, name) for name in _SYNTAX_TEXTS]
    if not all(value is None or (type(value) is int and -1 <= value <= _MAX_COLUMN) for value in numbers):
        raise _refused(made)
    if not all(value is None or (type(value) is str and len(value) <= _MAX_COLUMN) for value in texts):
        raise _refused(made)
    if made.print_file_and_line is not None:
        raise _refused(made)


def _refused(made: BaseException) -> NotAllowedError:
    return NotAllowedError(f"a message with a {type(made).__qualname__} that Python does not raise like that")


def set_native_attribute(made: BaseException, name: str, value: Any) -> bool:
    """Set an attribute outside of an exception's ``__dict__``; returns whether it is one. Raises `NotAllowedError`."""
    for kind, names in _NATIVE.items():
        if isinstance(made, kind) and name in (*names, "args"):
            if name != "args":  # newer versions of Python repeat the args in the state
                if value is not None and type(value) is not str:
                    raise NotAllowedError(f"a message with a {kind.__name__} whose {name} is no text")
                setattr(made, name, value)
            return True
    return False


# -- entries of the lists


def _maker(cls: type[BaseException]) -> Checked:
    def make(*args: Any) -> BaseException:
        check_arguments(cls, args)
        try:
            made = cls(*args)
        except (TypeError, ValueError, OverflowError):
            raise NotAllowedError(f"a message with a {cls.__qualname__} of the wrong values") from None
        check_exception(made)
        return made

    is_ours = cls.__module__ == errors.__name__ and not issubclass(cls, BaseExceptionGroup)
    return Checked(cls.__qualname__, make, rest=_PLAIN if is_ours else ANYTHING)


_PLAIN: Final = Check("a number, a text, or a tuple of these", is_plain)


def _fill_lists() -> None:
    kinds: list[tuple[str, str, Any]] = [("builtins", name, value) for name, value in vars(builtins).items()]
    kinds += [(errors.__name__, name, value) for name, value in vars(errors).items()]
    kinds += [("torch", "OutOfMemoryError", torch.OutOfMemoryError)]
    kinds += [("torch._C", "_LinAlgError", torch.linalg.LinAlgError)]  # type: ignore[attr-defined] # documented
    for module, name, value in kinds:
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == module:
            maker = _maker(value)
            for each in {name, value.__name__}:
                add_maker((module, each), value, maker)


_LOST: Final = Check(
    "WorkerLostError or OwnerLostError",
    lambda value: value is errors.WorkerLostError or value is errors.OwnerLostError,
)

_fill_lists()
allow_function(_LOST, TEXT, TEXT)(errors.rebuild_worker_lost)
