"""Objects to pickles with holes, and back.

`Pickler.dumps` returns a pickle (protocol 5) in which tensors, and the memory of objects that offer it out of band
(numpy arrays), are holes, and the contents of the holes as *slots*, in their order. `loads` takes both. Attributes that
the user has set on a plain tensor are not sent; those of an instance of a subclass are.

Pickle's own pickler, in C, makes nearly all pickles. A table has its reducers for tensors, and for types that need
special treatment; it runs no Python code for other objects. Objects that it cannot pickle (lambdas, local classes), or
would pickle wrongly (functions of ``__main__``), are pickled again by `reducers.HolePickler`, with the same table.
"""

from __future__ import annotations

import copyreg
import inspect
import pickle
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from operator import methodcaller, not_
from pickle import PickleBuffer
from typing import Any, Final

import cloudpickle
import numpy as np
from torch import Tensor
from torch.nn import Parameter

from arpc.errors import RRefError, SerializationError, WorkerLostError, not_run
from arpc.ids import WorkerInfo
from arpc.user_errors import text_of, type_name_of
from arpc.wire.values.checked_functions import SCALARS
from arpc.wire.values.packing import Slot
from arpc.wire.values.reducers import (
    FILL,
    FILL_PARAMETER,
    HOLE,
    IS_REGISTERED,
    MAIN_NAMES,
    MEMO,
    NUMBERS,
    PREFIX,
    DispatchTable,
    HolePickler,
    MainName,
    NamesOnlyPickler,
    Pickling,
    Reducer,
    importable_name,
    make_instance,
    reduce_array,
    reduce_number,
    reduce_tensor_subclass,
    spelled_out,
)

__all__ = ["SCALARS", "Pickler", "Pickling", "Reducer", "importable_name", "loads"]

_FLAT: Final = SCALARS | {Tensor}
_dumps, _loads = pickle.dumps, pickle.loads
_A_TENSOR: Final = _dumps(HOLE, protocol=5, buffer_callback=not_)
"""The pickle of a result that is a tensor."""
_MAX_CONSTANT: Final = 256
"""Arguments with more tensors than this are pickled like any others."""
_MAX_REUSED_BYTES: Final = 1 << 14
"""A pickler keeps a buffer of the size of its largest pickle, so it is dropped after a pickle larger than this."""
_MAX_REMEMBERED: Final = 1024
_MAX_FRAME_BYTES: Final = 1 << 18
"""The largest frame of a pickle: longer chunks are single texts and bytes of the user's."""
_CANNOT: Final = (pickle.PicklingError, AttributeError, TypeError)
"""The errors of the pickler in C for objects without a name. The user's code may raise them too, and does so again."""
_STACK_GLOBAL: Final = pickle.STACK_GLOBAL[0]
"""The opcode of an object pickled by name. An int: a search for bytes in bytes first raises an error inside Python."""
_by_value_modules: Final[Callable[[], set[str]]] = cloudpickle.list_registry_pickle_by_value
_reduce: Final = methodcaller("__reduce_ex__", 5)
_HEAP_TYPE: Final = 1 << 9


@lru_cache(_MAX_CONSTANT)
def _pickle_of_tensors(count: int) -> bytes:
    """Return the pickle of a tuple of ``count`` distinct tensors."""
    return _dumps((HOLE,) * count, protocol=5, buffer_callback=not_)


def _dumps_flat(values: tuple[Any, ...] | list[Any]) -> tuple[bytes, list[Slot]] | None:
    """Return pickle and slots of a tuple or list of scalars and distinct plain tensors; None for anything else.

    This needs no pickler of arpc's own, because no item holds other objects. All items may be in one list, which is the
    only argument of a call.
    """
    flat = values[0] if len(values) == 1 and type(values[0]) is list else values
    kinds = set(map(type, flat))
    if not kinds <= _FLAT:
        return None
    if Tensor not in kinds:
        return _dumps(values, protocol=5), []
    slots: list[Slot] = [*flat] if len(kinds) == 1 else [value for value in flat if value.__class__ is Tensor]
    count = len(slots)
    if count > 1 and (count > _MAX_CONSTANT or len({*map(id, slots)}) < count):
        return None
    if count == len(flat) and type(flat) is tuple:
        return _pickle_of_tensors(count), slots
    pickled: Any = [HOLE if value.__class__ is Tensor else value for value in flat]
    if type(flat) is tuple:
        pickled = tuple(pickled)
    if flat is not values:
        pickled = (pickled,) if type(values) is tuple else [pickled]
    return _dumps(pickled, protocol=5, buffer_callback=not_), slots


class Pickler:
    """Makes pickles with holes. Thread-safe, and reentrant: a reducer may use it while it makes another pickle."""

    def __init__(
        self,
        reducers: Mapping[type, Reducer] | None = None,
        families: Mapping[type, Reducer] | None = None,
        kind: type[HolePickler] = HolePickler,
    ) -> None:
        """``reducers`` are for objects of exactly that type, ``families`` also for those of its subclasses.

        ``kind`` pickles objects that pickle's own pickler cannot pickle, or refuses them.
        """
        self._reducers = dict(reducers or {})
        self._families = dict(families or {})
        self._kind = kind
        self._free: list[_BufferedPickler] = []

    def add_reducer(self, cls: type, reducer: Reducer) -> None:
        """Use a reducer for objects of exactly this class."""
        self._reducers[cls] = reducer
        self._free = []

    def dumps(
        self, obj: Any, *, main_by_value: bool = False, to: WorkerInfo | None = None, is_rehearsal: bool = False
    ) -> tuple[bytes, list[Slot]]:
        """Return pickle and slots of an object, for the worker ``to``. Raises any error of pickling it.

        ``main_by_value``: the peer does not run the same script, so objects of ``__main__`` are pickled by value.
        ``is_rehearsal``: the pickle will not be sent, so the callbacks of reducers (`Pickling.packed`) are not called.
        """
        if not main_by_value:
            # Taken out while in use: a reducer may pickle, and so may other threads (pop and append are atomic)
            free = self._free
            try:
                pickling = free.pop()
            except IndexError:
                pickling = _BufferedPickler(self._reducers, self._families, self._kind)
            try:
                payload, slots = pickling.dumps(obj, to)
            except _CANNOT:
                pickling.clear()
            except BaseException:
                pickling.clear()
                raise
            else:
                if pickling.packed:
                    pickling.run_callbacks(is_rehearsal)
                if len(payload) <= _MAX_REUSED_BYTES:
                    free.append(pickling)
                if payload:
                    return payload, slots
        careful = _BufferedPickler(
            self._reducers, self._families, self._kind, is_careful=True, main_by_value=main_by_value
        )
        try:
            pickled = careful.dumps(obj, to)
            careful.run_callbacks(is_rehearsal)
            return pickled
        finally:
            careful.clear()

    def dumps_call(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        *,
        main_by_value: bool,
        to: WorkerInfo | None = None,
    ) -> tuple[bytes, list[Slot]]:
        """Return pickle and slots of a call's arguments: args, or a tuple of args and kwargs if there are any kwargs.

        Raises `SerializationError`, which names the argument that cannot be sent, or the error of an RRef among them.
        """
        if not kwargs and (flat := _dumps_flat(args)) is not None:
            return flat
        try:
            return self.dumps((args, kwargs) if kwargs else args, main_by_value=main_by_value, to=to)
        except (RRefError, WorkerLostError):
            raise  # the error of an RRef that cannot be used is clear by itself
        except Exception as error:
            raise self.explained(function, args, kwargs or {}, error, main_by_value=main_by_value, to=to) from error

    def dumps_result(
        self, value: Any, *, main_by_value: bool, to: WorkerInfo | None = None
    ) -> tuple[bytes, list[Slot]]:
        """Return pickle and slots of a result. The pickle of None is empty. Raises any error of pickling it."""
        if value is None:
            return b"", []
        kind = type(value)
        if kind is Tensor:
            return _A_TENSOR, [value]
        if kind in SCALARS:
            return _dumps(value, protocol=5), []
        if (kind is tuple or kind is list) and (flat := _dumps_flat(value)) is not None:
            return flat
        return self.dumps(value, main_by_value=main_by_value, to=to)

    def explained(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        error: Exception,
        *,
        main_by_value: bool,
        to: WorkerInfo | None,
    ) -> SerializationError:
        """Return the error for arguments that cannot be sent, with the name of the first one that fails."""
        name = _function_name(function)
        for which, value in [*zip(_parameter_names(function, len(args)), args, strict=True), *kwargs.items()]:
            try:
                self.dumps(value, main_by_value=main_by_value, to=to, is_rehearsal=True)
            except BaseException as reason:  # noqa: BLE001 - a user's __reduce__ may raise anything
                kind, text = type_name_of(value), text_of(reason)
                return not_run(SerializationError(f"argument {which!r} of {name} ({kind}) cannot be sent: {text}"))
        return not_run(SerializationError(f"the arguments of {name} cannot be sent: {text_of(error)}"))


class _BufferedPickler:
    """A reusable pickler with its buffers. It is the `Pickling` that reducers get.

    It must not be reused after an error. A careful one is of the kind that pickles code by value, or refuses it; any
    other is pickle's own pickler.
    """

    def __init__(
        self,
        reducers: Mapping[type, Reducer],
        families: Mapping[type, Reducer],
        kind: type[HolePickler],
        *,
        is_careful: bool = False,
        main_by_value: bool = False,
    ) -> None:
        self.main_by_value = main_by_value
        self.to: WorkerInfo | None = None
        self.packed: list[Callable[[], None]] = []
        self._reducers = reducers
        self._families = families
        self._is_careful = is_careful
        self._names_main = not is_careful and not issubclass(kind, NamesOnlyPickler)
        self._chunks = [PREFIX]
        self.write = self._chunks.append
        self._tensors: list[Tensor] = []
        """The tensor of each `HOLE`, in their order."""
        self._buffers: list[PickleBuffer] = []
        """All out-of-band buffers, holes included."""
        self._always: dict[Any, Callable[[Any], Any]] = {
            **kind.dispatch_table,
            np.ndarray: reduce_array,
            **dict.fromkeys(NUMBERS, reduce_number),
            **{cls: partial(self._reduce_by, reducer) for cls, reducer in reducers.items()},
            Tensor: _tensor_reducer(self._tensors.append),
            Parameter: _parameter_reducer(self._tensors.append),
        }
        self.table = DispatchTable(self._always, self._find_reducer)
        self._known_to_copyreg = len(copyreg.dispatch_table)
        keep = self._buffers.append
        if is_careful:
            self._pickler: Any = kind(self, keep)
        else:
            self._pickler = pickle.Pickler(self, 5, buffer_callback=keep)
            self._pickler.dispatch_table = self.table
        self._pickler.memo = MEMO
        self._dump = self._pickler.dump

    def reduced(self, obj: Any) -> Any:
        """Return what the reducer for an object's type returns; NotImplemented if it declines, or there is none."""
        reducer = self._reducers.get(type(obj))
        return NotImplemented if reducer is None else reducer(obj, self)

    def dumps(self, obj: Any, to: WorkerInfo | None) -> tuple[bytes, list[Slot]]:
        """Return pickle and slots. An empty pickle means that the object needs a careful pickler."""
        self.to = to
        self._dump(obj)
        payload = b"".join(self._chunks)
        if _STACK_GLOBAL in payload and not self._is_careful and self._needs_care():
            self.clear()
            return b"", []
        del self._chunks[1:]
        # the new memo drops all references to the object
        self._pickler.memo = MEMO
        if not self._buffers:
            return payload, []
        tensors, buffers = self._tensors, self._buffers
        slots: list[Slot] = [*tensors]
        if len(tensors) < len(buffers):
            filling = iter(tensors)
            slots = [next(filling) if buffer is HOLE else buffer for buffer in buffers]
        tensors.clear()
        buffers.clear()
        return payload, slots

    def _needs_care(self) -> bool:
        """Whether an object was named that peers may have under another name, or whose pickle may have changed."""
        if len(copyreg.dispatch_table) != self._known_to_copyreg:
            self._known_to_copyreg = len(copyreg.dispatch_table)
            self._forget_classes()
            return True
        if (by_value := _by_value_modules()) and by_value.difference(MAIN_NAMES):
            return True
        return any(b"_main__" in chunk for chunk in self._chunks if len(chunk) <= _MAX_FRAME_BYTES)

    def run_callbacks(self, is_rehearsal: bool) -> None:
        """Call the callbacks of reducers, because the pickle is complete; a rehearsal only drops them."""
        packed, self.packed = self.packed, []
        for callback in () if is_rehearsal else packed:
            callback()

    def clear(self) -> None:
        """Drop the pickle made so far.

        A pickler is part of a reference cycle. The garbage collector frees it late, and never if it was there before
        `gc.freeze`: it would keep the arguments of a failed call alive, and with them RRefs that their owners count.
        """
        self._pickler.memo = MEMO
        if self._is_careful:
            self._pickler.globals_ref.clear()
        del self._chunks[1:]
        self._tensors.clear()
        self._buffers.clear()
        self.packed = []

    def _forget_classes(self) -> None:
        self.table.clear()
        self.table.update(self._always)

    def _find_reducer(self, cls: type) -> Callable[[Any], Any]:
        """Return the reducer for a class that is not in the table, and add it there if the class is permanent."""
        if issubclass(cls, type):
            raise KeyError(cls)  # a metaclass: its instances are classes, which are pickled by name
        reducer: Callable[[Any], Any] = _reduce
        if issubclass(cls, Tensor):
            reducer = self._reduce_subclass
        elif (family := self._family_of(cls)) is not None:
            reducer = partial(self._reduce_by, family)
        elif (registered := copyreg.dispatch_table.get(cls)) is not None:
            return registered  # not added: it may be replaced
        elif self._names_main and cls.__module__ in MAIN_NAMES:
            reducer = _main_reducer(cls)
        if importable_name(cls) is not None or not cls.__flags__ & _HEAP_TYPE:
            if len(self.table) >= len(self._always) + _MAX_REMEMBERED:
                self._forget_classes()
            self.table[cls] = reducer
        return reducer

    def _family_of(self, cls: type) -> Reducer | None:
        return next((reducer for head, reducer in self._families.items() if issubclass(cls, head)), None)

    def _reduce_by(self, reducer: Reducer, obj: Any) -> Any:
        reduced = reducer(obj, self)
        return reduced if reduced is not NotImplemented else copyreg.dispatch_table.get(type(obj), _reduce)(obj)

    def _reduce_subclass(self, obj: Tensor) -> Any:
        reduced = reduce_tensor_subclass(obj, self._tensors.append)
        return reduced if reduced is not NotImplemented else copyreg.dispatch_table.get(type(obj), _reduce)(obj)


def _tensor_reducer(add: Callable[[Tensor], None]) -> Callable[[Tensor], Any]:
    def reduce(tensor: Tensor) -> Any:
        add(tensor)
        # a new tuple each time: pickle would memoize one tuple, and take it for the same tensor
        return FILL, (HOLE,)

    return reduce


def _parameter_reducer(add: Callable[[Tensor], None]) -> Callable[[Tensor], Any]:
    def reduce(parameter: Tensor) -> Any:
        if vars(parameter):
            return reduce_tensor_subclass(parameter, add)
        add(parameter)
        return FILL_PARAMETER, (HOLE, parameter.requires_grad)

    return reduce


def _main_reducer(cls: type) -> Callable[[Any], Any]:
    """Return the reducer for objects of a class of the script: it pickles the name of the class, not the class."""
    name = MainName(cls.__qualname__)
    module_name, class_name = cls.__module__, cls.__qualname__

    def reduce(obj: Any) -> Any:
        # a notebook may have defined another class of this name meanwhile
        if getattr(sys.modules.get(module_name), class_name, None) is not cls and importable_name(cls) is None:
            raise pickle.PicklingError(f"{cls!r} is not what the script has under this name now")
        reduced = _reduce(obj)
        if type(reduced) is tuple and len(reduced) > 1:
            function, args, *rest = reduced
            if function is _newobj and args[0] is cls:
                return make_instance, (name, *args[1:]), *rest
            if function is cls:
                return name, args, *rest
        return reduced

    return reduce


_newobj: Final[Any] = copyreg.__newobj__  # type: ignore[attr-defined]


def _function_name(function: Any) -> str:
    try:
        return str(getattr(function, "__qualname__", "")) or type_name_of(function)
    except BaseException:  # noqa: BLE001 - attributes of a user's object may raise anything
        return type_name_of(function)


def _parameter_names(function: Any, count: int) -> list[str]:
    """Return the names of a function's positional parameters; their numbers where it has no names."""
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


def loads(payload: bytes | bytearray | memoryview, slots: list[Any], _sender: WorkerInfo | None = None) -> Any:
    """Return the object of a pickle and its slots. Raises any error of unpickling it.

    Unpickling may run any code. Pickles of peers are read through a `policy`; this is how the unrestricted one does it.
    """
    return _loads(payload if IS_REGISTERED else spelled_out(payload), buffers=slots)
