"""Objects as a pickle with holes, and back.

`Pickler.dumps` gives a pickle (protocol 5) in which tensors, and the memory of objects that offer it out of band (numpy
arrays), are holes; what fills them comes beside it as *slots*, in their order. `loads` takes both. Of a plain tensor
there travels what torch knows of it, not the attributes that someone has set on it; those of a subclass do.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Mapping
from operator import not_
from typing import Any, Final

from torch import Tensor

from arpc.errors import RRefError, SerializationError, WorkerLostError, not_run
from arpc.ids import WorkerInfo
from arpc.user_errors import text_of, type_name_of
from arpc.wire.handful import MAX_TENSORS
from arpc.wire.reducing import HOLE, HolePickler, Parcel, Reducer, importable_name
from arpc.wire.tensors import Slot

__all__ = [
    "JUST_A_TENSOR",
    "JUST_TENSORS",
    "ONE_TENSOR",
    "SCALARS",
    "Parcel",
    "Pickler",
    "Reducer",
    "dumps_flat",
    "dumps_plain",
    "importable_name",
    "loads",
]

# Clearing a pickler takes time in proportion to the largest pickle it ever made. After a larger one than this it is
# cheaper to make another, which takes 1.5 us.
_MAX_REUSED_BYTES: Final = 1024
# A container this long is looked through only if it begins with a tensor
_MAX_UNLIKELY: Final = 1000
SCALARS: Final = frozenset((int, float, bool, str, bytes, complex, type(None)))
"""Objects of just these types take up no slots, and to pickle them runs no code but the pickler's own."""
_CONTAINERS: Final = frozenset((tuple, list, dict))
_PLAIN: Final = SCALARS | _CONTAINERS | {Tensor}
_ONLY_TENSORS: Final = {Tensor}
_dump = pickle.Pickler.dump  # cloudpickle's own only explains recursion errors
_dumps = pickle.dumps
JUST_A_TENSOR: Final = pickle.dumps(HOLE, protocol=5, buffer_callback=not_)
"""The pickle of a result that is a tensor. Always this very object, by which such a message is known."""
JUST_TENSORS: Final = tuple(
    pickle.dumps((HOLE,) * count, protocol=5, buffer_callback=not_) for count in range(MAX_TENSORS + 1)
)
"""The same for the arguments of a call that are just so many tensors."""
ONE_TENSOR: Final = JUST_TENSORS[1]
_MAX_PATTERNS: Final = 64


class Pickler:
    """Makes pickles with holes, for any number of threads, and while another of its pickles is being made."""

    def __init__(
        self,
        reducers: Mapping[type, Reducer] | None = None,
        families: Mapping[type, Reducer] | None = None,
        kind: type[HolePickler] = HolePickler,
    ) -> None:
        """``reducers`` are for objects of just that type, ``families`` for those of its subclasses, too."""
        self._reducers = dict(reducers or {})
        self._families = dict(families or {})
        self._kind = kind
        self._repeated: dict[tuple[int, ...], bytes] = {}
        """Pickles of arguments that are just tensors, some of them more than once, by which ones."""
        self._free = [kind(self._reducers, self._families)]

    def add_reducer(self, cls: type, reducer: Reducer) -> None:
        """Let objects of a class, and of this very class, travel in another way than they are pickled."""
        self._reducers[cls] = reducer

    def dumps(
        self, obj: Any, *, main_by_value: bool = False, to: WorkerInfo | None = None, is_rehearsal: bool = False
    ) -> tuple[bytes, list[Slot]]:
        """Pickle and slots of an object, for the worker ``to``. Raises whatever pickling it raises.

        ``main_by_value``: the peer does not run the same script, so what ``__main__`` defines must travel itself.
        ``is_rehearsal``: it will not be sent, so reducers are not told that it is complete.
        """
        # Taken out while in use: a reducer may pickle, and so may other threads (pop and append are atomic)
        try:
            pickler = self._free.pop()
        except IndexError:
            pickler = self._kind(self._reducers, self._families)
        pickler.main_by_value = main_by_value
        pickler.to = to
        try:
            _dump(pickler, obj)
            if pickler.packed:
                packed, pickler.packed = pickler.packed, []
                for tell in () if is_rehearsal else packed:
                    tell()
        except BaseException:
            pickler.forget()  # it is not put back, and need not be found by the garbage collector
            raise
        chunks = pickler.chunks
        payload = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        slots = pickler.slots
        # A pickler refers to itself: what it still knows of would wait for the garbage collector with it
        chunks.clear()
        if slots:
            pickler.slots = []
        if pickler.globals_ref:
            pickler.globals_ref.clear()
        pickler.clear_memo()
        if len(payload) <= _MAX_REUSED_BYTES:
            self._free.append(pickler)
        return payload, slots

    def dumps_call(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        *,
        main_by_value: bool,
        to: WorkerInfo | None = None,
    ) -> tuple[bytes, list[Slot]]:
        """The same for the arguments of a call: args, or a tuple of args and kwargs if there are any of these.

        Raises `SerializationError`, which names the argument that cannot travel.
        """
        if not kwargs:
            if len(args) == 1 and type(args[0]) is Tensor:
                return ONE_TENSOR, [args[0]]
            kinds = set(map(type, args))
            if kinds <= SCALARS:
                return _dumps(args, protocol=5), []
            if kinds == _ONLY_TENSORS and len(args) <= MAX_TENSORS:
                slots = {id(arg): arg for arg in args}
                if len(slots) == len(args):
                    return JUST_TENSORS[len(args)], list(args)
                return self._dumps_repeated(args, slots)
        try:
            return self._dumps_plain((args, kwargs) if kwargs else args, main_by_value=main_by_value, to=to)
        except (RRefError, WorkerLostError):
            raise  # an RRef that cannot be used says so itself
        except Exception as error:
            raise self.explained(function, args, kwargs or {}, error, main_by_value=main_by_value, to=to) from error

    def _dumps_repeated(self, args: tuple[Tensor, ...], slots: dict[int, Tensor]) -> tuple[bytes, list[Slot]]:
        """The same for a few tensors, some of which are there more than once: they are one object there, too."""
        places = dict(zip(slots, range(len(slots)), strict=True))
        pattern = tuple([places[id(arg)] for arg in args])
        payload = self._repeated.get(pattern)
        if payload is None:
            payload, _ = self.dumps(args)
            if len(self._repeated) < _MAX_PATTERNS:
                self._repeated[pattern] = payload
        return payload, list(slots.values())

    def dumps_result(
        self, value: Any, *, main_by_value: bool, to: WorkerInfo | None = None
    ) -> tuple[bytes, list[Slot]]:
        """The same for what a function returned. None is the empty pickle. Raises whatever pickling it raises."""
        if value is None:
            return b"", []
        kind = type(value)
        if kind in SCALARS:
            return _dumps(value, protocol=5), []
        if kind is Tensor:
            return JUST_A_TENSOR, [value]
        if kind in _CONTAINERS:
            return self._dumps_plain(value, main_by_value=main_by_value, to=to)
        return self.dumps(value, main_by_value=main_by_value, to=to)

    def _dumps_plain(self, value: Any, *, main_by_value: bool, to: WorkerInfo | None) -> tuple[bytes, list[Slot]]:
        """The same as `dumps`, for what is likely to be made of containers, scalars and tensors alone.

        Then the tensors are cut out here, at a third of what it costs to have the pickler reduce each.
        """
        tensors: list[Slot] = []
        try:
            cut = _cut_out(value, tensors, set())
        except (_NotPlainError, RecursionError):
            return self.dumps(value, main_by_value=main_by_value, to=to)
        if len(tensors) > 1 and len(set(map(id, tensors))) < len(tensors):
            return self.dumps(value, main_by_value=main_by_value, to=to)  # which keeps one object one
        return _dumps(cut, protocol=5, buffer_callback=not_), tensors

    def explained(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        error: Exception,
        *,
        main_by_value: bool,
        to: WorkerInfo | None,
    ) -> SerializationError:
        """Why the arguments of a call cannot be sent: finds the one that is to blame."""
        name = _function_name(function)
        for which, value in [*zip(_parameter_names(function, len(args)), args, strict=True), *kwargs.items()]:
            try:
                self.dumps(value, main_by_value=main_by_value, to=to, is_rehearsal=True)
            except BaseException as reason:  # noqa: BLE001 - whatever a user's __reduce__ may raise
                kind, text = type_name_of(value), text_of(reason)
                return not_run(SerializationError(f"argument {which!r} of {name} ({kind}) cannot be sent: {text}"))
        return not_run(SerializationError(f"the arguments of {name} cannot be sent: {text_of(error)}"))


class _NotPlainError(Exception):
    """There is something that only the pickler can judge."""


def _cut_out(value: Any, tensors: list[Slot], seen: set[int]) -> Any:
    """A copy of a container with a hole in place of each tensor, or the container itself if there are none in it."""
    kind = type(value)
    if kind not in _CONTAINERS or id(value) in seen:
        raise _NotPlainError  # one object in two places must stay one, and may contain itself
    seen.add(id(value))
    items = value
    if kind is dict:
        items = value.values()
        if not SCALARS.issuperset(map(type, value)):
            raise _NotPlainError
    if len(items) > _MAX_UNLIKELY and type(next(iter(items))) is not Tensor:
        raise _NotPlainError
    kinds = set(map(type, items))
    if kinds <= SCALARS:
        return value
    cut: list[Any]
    if kinds == _ONLY_TENSORS:
        tensors += items
        cut = [HOLE] * len(items)
    elif kinds <= _PLAIN:
        cut = []
        for item in items:
            kind_of_item = type(item)
            if kind_of_item is Tensor:
                tensors.append(item)
                cut.append(HOLE)
            else:
                cut.append(item if kind_of_item in SCALARS else _cut_out(item, tensors, seen))
    else:
        raise _NotPlainError
    if kind is tuple:
        return tuple(cut)
    return cut if kind is list else dict(zip(value, cut, strict=True))


def _function_name(function: Any) -> str:
    try:
        return str(getattr(function, "__qualname__", "")) or type_name_of(function)
    except BaseException:  # noqa: BLE001 - attributes of a user's object may raise anything
        return type_name_of(function)


def _parameter_names(function: Any, count: int) -> list[str]:
    """What the function calls its positional arguments; by number where it does not say."""
    names = [str(number) for number in range(count)]
    try:
        parameters = inspect.signature(function).parameters.values()
    except BaseException:  # noqa: BLE001 - a builtin, or an object whose attributes may raise anything
        return names
    for number, parameter in enumerate(list(parameters)[:count]):
        if parameter.kind not in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}:
            break
        names[number] = parameter.name
    return names


def dumps_flat(head: bytes, tensors: list[Slot], *, is_call: bool) -> tuple[bytes, list[Slot]]:
    """`Pickler.dumps` for a list of bytes and of plain tensors after it, or for the one argument of a call that it is.

    A tensor that is in it twice will be two.
    """
    flat = [head, *[HOLE] * len(tensors)]
    return _dumps((flat,) if is_call else flat, protocol=5, buffer_callback=not_), tensors


def dumps_plain(value: Any) -> bytes | None:
    """`Pickler.dumps` for scalars, and containers of nothing but these; None for all else. Runs no code of others."""
    if type(value) not in SCALARS:
        tensors: list[Slot] = []
        try:
            _cut_out(value, tensors, set())
        except (_NotPlainError, RecursionError):
            return None
        if tensors:
            return None
    return _dumps(value, protocol=5)


def loads(payload: bytes | bytearray | memoryview, slots: list[Any], _sender: WorkerInfo | None = None) -> Any:
    """The object of a pickle and its slots. Raises whatever unpickling it raises.

    The pickle runs what it names. What peers sent is read by `wire.policy`, of which this is the unrestricted half.
    """
    return pickle.loads(payload, buffers=slots)
