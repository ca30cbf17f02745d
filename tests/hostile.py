"""A zoo of exceptions and objects whose own code works against the runtime that handles them.

`EXCEPTIONS` and `VALUES` have a maker for each specimen, by name. Makers are looked up by name on the worker where a
specimen is needed, so that nothing but the name travels. Most specimens come in several variants: the method that gives
them their name raises one of `REASONS`, an ordinary error or one that would end a process, a generator or a task.

A specimen says what it should: its message contains `MESSAGE` where that can be had at all.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

__all__ = ["EXCEPTIONS", "HOOKS", "HOOK_REASONS", "MESSAGE", "REASONS", "VALUES", "VALUE_HOOKS", "raise_reason"]

MESSAGE: Final = "what the specimen says"


class UnrulyError(BaseException):
    """Not an Exception, so that hardly anybody catches it."""


REASONS: Final[dict[str, Callable[[], BaseException]]] = {
    "LookupError": lambda: LookupError("a trap"),
    "SystemExit": lambda: SystemExit("a trap"),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("a trap"),
    "GeneratorExit": lambda: GeneratorExit("a trap"),
    "CancelledError": lambda: asyncio.CancelledError("a trap"),
    "StopIteration": lambda: StopIteration("a trap"),
    "RecursionError": lambda: RecursionError("a trap"),
    "MemoryError": lambda: MemoryError("a trap"),
    "UnrulyError": lambda: UnrulyError("a trap"),
}


HOOK_REASONS: Final = ("LookupError", "SystemExit", "KeyboardInterrupt", "GeneratorExit", "CancelledError")
"""Of these there is a variant for each method: the runtime catches them in different places."""


def raise_reason(reason: str) -> Any:
    """Raise one of `REASONS`."""
    error = REASONS[reason]()
    raise error


def _trap(reason: str) -> Callable[..., Any]:
    def trap(*_: Any, **__: Any) -> Any:
        raise_reason(reason)

    return trap


def _register(name: str, bases: tuple[type, ...], namespace: dict[str, Any], metaclass: type = type) -> Any:
    """A class that can be found in this module, as classes of users can."""
    made = metaclass(name, bases, {"__module__": __name__, "__qualname__": name, **namespace})
    globals()[name] = made
    return made


# -- exceptions

METHODS: Final = (
    *("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__copy__", "__str__", "__repr__", "__setattr__"),
    *("__getattr__", "__getattribute__", "__eq__", "__hash__", "__bool__", "__len__", "with_traceback", "__del__"),
)
FIELDS: Final = (
    *("__class__", "__cause__", "__context__", "__suppress_context__", "__traceback__", "__notes__", "__dict__"),
    *("args", "__module__", "may_have_run", "is_of_answer"),
)
OF_METACLASS: Final = ("__getattribute__", "__instancecheck__", "__subclasscheck__", "__hash__", "__eq__")
FIELDS_OF_METACLASS: Final = ("__name__", "__qualname__", "__module__", "__mro__", "__class__")
HOOKS: Final = (*METHODS, *FIELDS, *(f"type.{name}" for name in (*OF_METACLASS, *FIELDS_OF_METACLASS)))


def _class(prefix: str, hook: str, reason: str, base: type) -> Any:
    """A class of which one method, one field, or one of its metaclass, raises."""
    name = f"{prefix}_{hook.replace('.', '_').strip('_')}_{reason}"
    trap = _trap(reason)
    if hook.startswith("type."):
        hook = hook.removeprefix("type.")
        metaclass = type("Meta", (type,), {hook: trap} if hook in OF_METACLASS else _asked_for(hook, reason, type))
        return _register(name, (base,), {}, metaclass)
    if hook in METHODS or hook in VALUE_METHODS:
        return _register(name, (base,), {hook: trap})
    return _register(
        name, (base,), _asked_for(hook, reason, base) if hook == "__qualname__" else {hook: property(trap)}
    )


def _asked_for(field: str, reason: str, base: type) -> dict[str, Any]:
    """The namespace of a class that raises when one field is asked for, and cannot have a property in its place."""

    def get(self: Any, name: str) -> Any:
        if name == field:
            raise_reason(reason)
        return base.__getattribute__(self, name)

    return {"__getattribute__": get}


def _hooked_exceptions() -> Iterator[tuple[str, Callable[[], BaseException]]]:
    for hook, reason in itertools.product(HOOKS, HOOK_REASONS):
        cls = _class("Error", hook, reason, Exception)
        yield f"{hook}-{reason}", lambda cls=cls: cls(MESSAGE)


class _Secret:
    """Who has it may construct a specimen: the runtime has not."""


SECRET: Final = _Secret()


class OnceError(Exception):
    """Its constructor cannot be called a second time."""

    def __init__(self, text: str, secret: Any = None) -> None:
        if secret is not SECRET:
            raise SystemExit("constructed again")
        super().__init__(text)


class NewOnceError(Exception):
    def __new__(cls, text: str, secret: Any = None) -> Any:
        if secret is not SECRET:
            raise KeyboardInterrupt("made again")
        return super().__new__(cls, text)

    def __init__(self, text: str, secret: Any = None) -> None:
        super().__init__(text)


class ManyArgumentsError(Exception):
    def __init__(self, one: Any, two: Any, *, three: Any) -> None:
        super().__init__(f"{one}{two}{three}")


class RebuiltError(Exception):
    """Is rebuilt as whatever a function returns."""

    def __init__(self, text: str, *how: Any) -> None:
        super().__init__(text)
        self.how = how

    def __reduce__(self) -> Any:
        return self.how


class SilentStr(str):
    """A text that raises when it is used as one."""

    __slots__ = ()

    __len__ = __iter__ = __format__ = __add__ = __radd__ = splitlines = encode = partition = _trap("SystemExit")


class StrangeTextError(Exception):
    def __str__(self) -> str:
        return SilentStr(f"{MESSAGE}\n")


class NoTextError(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]  # noqa: PLE0307 - that is the point of it

    __repr__ = __str__


class HeldError(Exception):
    """Has an argument that is hostile itself."""


class StopKindError(StopIteration):
    """Would end a generator or a coroutine as a return does."""


class StopAsyncKindError(StopAsyncIteration):
    pass


class ExitKindError(SystemExit):
    @property
    def code(self) -> Any:  # type: ignore[override]
        raise SystemExit("asked for its code")


class InterruptKindError(KeyboardInterrupt):
    def __reduce__(self) -> Any:
        raise KeyboardInterrupt("pickled")


class GeneratorExitKindError(GeneratorExit):
    def __repr__(self) -> str:
        raise SystemExit("shown")


class SyntaxKindError(SyntaxError):
    """The formatter of tracebacks looks at many fields of these."""

    lineno = property(_trap("SystemExit"))
    text = property(_trap("SystemExit"))
    offset = property(_trap("SystemExit"))


class ImportKindError(ImportError):
    name = property(_trap("SystemExit"))


class GroupKindError(ExceptionGroup[Exception]):
    exceptions = property(_trap("SystemExit"))  # type: ignore[assignment]


class LongError(Exception):
    pass


class WithTensorError(Exception):
    pass


class LockedError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def _with_cause_cycle() -> BaseException:
    first, second = LookupError(MESSAGE), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    return first


def _with_context_cycle() -> BaseException:
    first, second = LookupError(MESSAGE), ValueError("second")
    first.__context__, second.__context__ = second, first
    return first


def _own_cause() -> BaseException:
    error = LookupError(MESSAGE)
    error.__cause__ = error
    return error


def _long_chain() -> BaseException:
    error: BaseException = LookupError("first")
    for number in range(3000):
        following = LookupError(number)
        following.__cause__ = error
        error = following
    last = LookupError(MESSAGE)
    last.__cause__ = error
    return last


def _deep_group() -> BaseException:
    group: Exception = LookupError("inner")
    for _ in range(2000):
        group = ExceptionGroup("deep", [group])
    return ExceptionGroup(MESSAGE, [group])


def _deep_list() -> list[Any]:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    return deep


class Link:
    """Of a chain that is too long to be shown or packed.

    Not a list in a list: Python 3.14 shows some 80,000 of these before it gives up, which takes more than a second.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"Link({self.inner!r})"


def _chain() -> Link | None:
    chain = None
    for _ in range(100_000):
        chain = Link(chain)
    return chain


def _hostile_cause(hook: str, reason: str) -> BaseException:
    error = LookupError(MESSAGE)
    BaseException.__dict__["__cause__"].__set__(error, EXCEPTIONS[f"{hook}-{reason}"]())
    return error


def _hostile_group() -> BaseException:
    members = [
        f"{hook}-{reason}" for hook in ("__str__", "__reduce__", "__notes__", "__class__") for reason in HOOK_REASONS
    ]
    return BaseExceptionGroup(MESSAGE, [EXCEPTIONS[name]() for name in members])


def _hostile_note() -> BaseException:
    error = LookupError(MESSAGE)
    error.__notes__ = [VALUES["__str__-SystemExit"]()]
    return error


def _on_the_fly() -> BaseException:
    class LocalError(Exception):
        def __str__(self) -> str:
            raise SystemExit("shown")

    return LocalError(MESSAGE)


def _with_lying_class() -> BaseException:
    return _register("LyingError", (Exception,), {"__class__": property(lambda _: asyncio.CancelledError)})(MESSAGE)


_OTHERS: Final[dict[str, Callable[[], BaseException]]] = {
    "constructed once": lambda: OnceError(MESSAGE, SECRET),
    "made once": lambda: NewOnceError(MESSAGE, SECRET),
    "many arguments": lambda: ManyArgumentsError(MESSAGE, 2, three=3),
    **{
        f"rebuilt with {reason}": lambda reason=reason: RebuiltError(MESSAGE, raise_reason, (reason,))
        for reason in REASONS
    },
    "rebuilt as a text": lambda: RebuiltError(MESSAGE, str, ("text",)),
    "rebuilt as a class": lambda: RebuiltError(MESSAGE, type, (Exception,)),
    "rebuilt as an exit": lambda: RebuiltError(MESSAGE, SystemExit, ("exit",)),
    "reduced to nothing": lambda: RebuiltError(MESSAGE),
    "reduced to nonsense": lambda: RebuiltError(MESSAGE, 1, 2, 3, 4, 5, 6, 7),
    "strange text": StrangeTextError,
    "no text": lambda: NoTextError(MESSAGE),
    "hostile argument": lambda: HeldError(MESSAGE, VALUES["__repr__-SystemExit"]()),
    "hostile pickle inside": lambda: HeldError(MESSAGE, VALUES["__reduce__-SystemExit"]()),
    "exception as argument": lambda: HeldError(MESSAGE, EXCEPTIONS["__str__-SystemExit"]()),
    "deep argument": lambda: HeldError(MESSAGE, _chain()),
    "StopIteration": lambda: StopKindError(MESSAGE),
    "StopAsyncIteration": lambda: StopAsyncKindError(MESSAGE),
    "SystemExit": lambda: ExitKindError(MESSAGE),
    "KeyboardInterrupt": lambda: InterruptKindError(MESSAGE),
    "GeneratorExit": lambda: GeneratorExitKindError(MESSAGE),
    "UnrulyError": lambda: UnrulyError(MESSAGE),
    "RecursionError": lambda: RecursionError(MESSAGE),
    "MemoryError": lambda: MemoryError(MESSAGE),
    "SyntaxError": lambda: SyntaxKindError(MESSAGE),
    "ImportError": lambda: ImportKindError(MESSAGE),
    "ExceptionGroup": lambda: GroupKindError(MESSAGE, [LookupError("inner")]),
    "cause cycle": _with_cause_cycle,
    "context cycle": _with_context_cycle,
    "its own cause": _own_cause,
    "long chain": _long_chain,
    "deep group": _deep_group,
    "hostile cause": lambda: _hostile_cause("__str__", "SystemExit"),
    "cause with hostile notes": lambda: _hostile_cause("__notes__", "SystemExit"),
    "cause with hostile class": lambda: _hostile_cause("__class__", "KeyboardInterrupt"),
    "hostile group": _hostile_group,
    "hostile note": _hostile_note,
    "class made on the fly": _on_the_fly,
    "lying class": _with_lying_class,
    "long message": lambda: LongError(MESSAGE + "x" * 3_000_000),
    "tensors": lambda: WithTensorError(MESSAGE, torch.arange(3), torch.ones(100_000)),
    "lock": lambda: LockedError(MESSAGE),
}

# -- values

VALUE_METHODS: Final = (
    *("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__str__", "__repr__", "__eq__", "__hash__"),
    *("__bool__", "__len__", "__iter__", "__next__", "__aiter__", "__anext__", "__await__", "__getattr__"),
    *("__getattribute__", "__setattr__", "__del__", "__call__", "__torch_function__"),
)
VALUE_FIELDS: Final = ("__class__", "__dict__", "__module__", "__name__", "__qualname__", "__wrapped__")
VALUE_HOOKS: Final = (
    *VALUE_METHODS,
    *VALUE_FIELDS,
    *(f"type.{name}" for name in (*OF_METACLASS, *FIELDS_OF_METACLASS)),
)


def _hooked_values() -> Iterator[tuple[str, Callable[[], Any]]]:
    for hook, reason in itertools.product(VALUE_HOOKS, HOOK_REASONS):
        yield f"{hook}-{reason}", _class("Value", hook, reason, object)


class Rebuilt:
    """Is rebuilt as whatever a function returns."""

    def __init__(self, *how: Any) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        return self.how


class ReducedToText:
    def __reduce__(self) -> Any:
        return "no such name"


class ReducedToNumber:
    def __reduce__(self) -> Any:
        return 7


class RaisesSpecimen:
    """Pickling it raises an exception that is hostile itself."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        raise_specimen(self.name)


def raise_specimen(name: str) -> Any:
    """Raise one of `EXCEPTIONS`."""
    error = EXCEPTIONS[name]()
    raise error


class Endless:
    """Each step of pickling it makes another one."""

    def __reduce__(self) -> Any:
        return Endless, (), {"next": Endless()}


class LyingTensor:
    """Says that it is a tensor."""

    @property
    def __class__(self) -> Any:
        return torch.Tensor

    @__class__.setter
    def __class__(self, _: Any) -> None: ...


HOSTILE_REASONS: Final = ("__str__-SystemExit", "__class__-SystemExit", "type.__qualname__-KeyboardInterrupt")

_OTHER_VALUES: Final[dict[str, Callable[[], Any]]] = {
    **{f"rebuilt with {reason}": lambda reason=reason: Rebuilt(raise_reason, (reason,)) for reason in REASONS},
    **{f"rebuilt with {name}": lambda name=name: Rebuilt(raise_specimen, (name,)) for name in HOSTILE_REASONS},
    **{f"pickling raises {name}": lambda name=name: RaisesSpecimen(name) for name in HOSTILE_REASONS},
    "reduced to nothing": Rebuilt,
    "reduced to nonsense": lambda: Rebuilt(1, 2, 3),
    "reduced to a text": ReducedToText,
    "reduced to a number": ReducedToNumber,
    "deep": _deep_list,
    "endless": Endless,
    "lying tensor": LyingTensor,
    "lock": threading.Lock,
    "an exception": lambda: EXCEPTIONS["__str__-SystemExit"](),  # noqa: PLW0108 - which is not there yet
    "an exception without class": lambda: EXCEPTIONS["__class__-SystemExit"](),  # noqa: PLW0108 - the same
    "a class": lambda: globals()["Value_type___getattribute_SystemExit"],
    "in a list": lambda: [VALUES["__reduce__-KeyboardInterrupt"]()],
    "in a dict": lambda: {"key": VALUES["__class__-SystemExit"]()},
    "as a key": lambda: {VALUES["__reduce__-SystemExit"](): 1},
}

EXCEPTIONS: Final[dict[str, Callable[[], BaseException]]] = {**dict(_hooked_exceptions()), **_OTHERS}
VALUES: Final[dict[str, Callable[[], Any]]] = {**dict(_hooked_values()), **_OTHER_VALUES}
