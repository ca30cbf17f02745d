"""Objects as a pickle with holes, and back.

`Pickler.dumps` gives a pickle (protocol 5) in which tensors, and the memory of objects that offer it out of band (numpy arrays),
are numbered holes; what fills them comes beside it as *slots*. `loads` takes both. Where pickle alone would not do:

- functions and classes the peer can import travel by name, others (lambdas, closures, notebook cells) by value;
- ``__main__`` counts as importable when the peer runs the same script, so that its globals are the peer's own;
- types of other parts of arpc bring their own *reducers*, handed in by whoever builds the pickler.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Mapping
from pickle import PickleBuffer
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final, Protocol, cast

import cloudpickle
import torch
from torch import Tensor
from torch.nn import Parameter

from arpc.errors import SerializationError
from arpc.ids import WorkerInfo
from arpc.wire.tensors import Slot

__all__ = ["Parcel", "Pickler", "Reducer", "importable_name", "loads"]


class Parcel(Protocol):
    """The pickle that is being made, as a reducer sees it."""

    to: WorkerInfo | None
    """Who will unpack it; None if that is not a worker."""
    packed: list[Callable[[], None]]
    """Called once the pickle is complete, but not if it fails."""


Reducer = Callable[[Any, Parcel], tuple[Any, ...] | str]
"""Like ``__reduce__``, but a function of the object and the parcel. `NotImplemented` may not be returned."""

MAIN_NAMES: Final = ("__main__", "__mp_main__")
"""The script, and what multiprocessing calls it in a spawned child."""

# What stands for a hole. It is writable because pickle marks read-only buffers, and would then look into what fills the hole.
_HOLE: Final = PickleBuffer(bytearray())
_JUST_A_HOLE: Final = pickle.dumps(_HOLE, 5, buffer_callback=lambda _: None)
_FLAT: Final = frozenset((Tensor, int, float, bool, str, bytes, type(None)))
_dump = pickle.Pickler.dump
_PLAIN_TENSOR_REDUCE: Final = Tensor.__reduce_ex__


def _fill(slot: Any) -> Any:
    return slot


def _fill_parameter(tensor: Tensor, requires_grad: bool) -> Tensor:
    # A parameter that was recorded for autograd has a history here, which a leaf cannot have
    if tensor.grad_fn is not None:
        return tensor
    return Parameter(tensor.detach(), requires_grad)


def _fill_subclass(cls: type[Tensor], tensor: Tensor, requires_grad: bool, state: dict[str, Any]) -> Tensor:
    if tensor.grad_fn is None:
        made = tensor.detach().as_subclass(cls).requires_grad_(requires_grad)
    else:
        made = tensor.as_subclass(cls)
    made.__dict__.update(state)
    return made


def _fill_wrapper(
    cls: Any,
    inner: dict[str, Tensor],
    context: Any,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> Tensor:
    made = cast("Tensor", cls.__tensor_unflatten__(inner, context, torch.Size(size), stride))
    return made.requires_grad_() if requires_grad and made.grad_fn is None else made


class _StatefulPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A C pickler that is used again and again: making one costs more than a small message."""

    def __init__(self, reducers: Mapping[type, Reducer]) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, protocol=5, buffer_callback=self._memory_found)
        self.reducers = reducers
        self.slots: list[Slot] = []
        self.main_by_value = False
        self.to: WorkerInfo | None = None
        self.packed: list[Callable[[], None]] = []

    def _memory_found(self, buffer: PickleBuffer) -> None:
        # None keeps the buffer out of band. Holes were noted in reducer_override, where the tensor was at hand.
        if buffer is not _HOLE:
            self.slots.append(buffer)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is Tensor:
            self.slots.append(obj)
            # a new tuple each time: pickle would take an equal one, memoized, for the same tensor
            return _fill, (_HOLE,)
        if obj is _fill:
            return NotImplemented  # the most common function of all: by name, and without a closer look
        reducer = self.reducers.get(kind)
        if reducer is not None:
            return reducer(obj, self)
        if isinstance(obj, Tensor):
            return self._reduce_subclass(obj)
        if kind is FunctionType or isinstance(obj, type):
            module = getattr(obj, "__module__", None)
            if module in MAIN_NAMES:
                return self._reduce_of_main(obj)
            return super().reducer_override(obj)
        return NotImplemented

    def _reduce_subclass(self, obj: Tensor) -> Any:
        cls = type(obj)
        if cls is Parameter:
            self.slots.append(obj)
            return _fill_parameter, (_HOLE, obj.requires_grad)
        if hasattr(cls, "__tensor_flatten__"):
            names, context = obj.__tensor_flatten__()  # type: ignore[attr-defined]
            inner = {name: getattr(obj, name) for name in names}
            return _fill_wrapper, (cls, inner, context, tuple(obj.shape), tuple(obj.stride()), obj.requires_grad)
        if cls.__reduce_ex__ is not _PLAIN_TENSOR_REDUCE and not issubclass(cls, Parameter):
            return NotImplemented  # it knows how to pickle itself
        self.slots.append(obj.as_subclass(Tensor))
        return _fill_subclass, (cls, _HOLE, obj.requires_grad, dict(obj.__dict__))

    def _reduce_of_main(self, obj: Any) -> Any:
        if not self.main_by_value and importable_name(obj) is not None:
            return _from_main, (obj.__qualname__,)
        if obj.__module__ == "__mp_main__":
            # cloudpickle takes it for an importable module, which it is in no other process
            cloudpickle.register_pickle_by_value(sys.modules["__mp_main__"])
        return super().reducer_override(obj)


def _from_main(qualname: str) -> Any:
    """What this process's own script calls by that name."""
    found: Any = sys.modules["__main__"]
    for name in qualname.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise SerializationError(
                f"{qualname!r} is not in this worker's __main__ ({getattr(sys.modules['__main__'], '__file__', None)}). "
                f"Define it at the top level of the script, outside of `if __name__ == '__main__':`, or in a module"
            ) from None
    return found


def importable_name(obj: Any) -> tuple[str, str] | None:
    """Module and qualified name under which importing gives this very object, or None."""
    module_name = getattr(obj, "__module__", None)
    qualname = getattr(obj, "__qualname__", None)
    if module_name is None or qualname is None:
        return None
    module = sys.modules.get(module_name)
    found: Any = module
    for name in qualname.split("."):
        found = getattr(found, name, None)
    if found is obj:
        return module_name, qualname
    # torch's operators name a hidden class, but live in their module as well
    if isinstance(obj, BuiltinFunctionType) and getattr(module, obj.__name__, None) is obj:
        return module_name, obj.__name__
    return None


class Pickler:
    """Makes pickles with holes. Safe to use while another of its pickles is being made (a reducer may do that)."""

    def __init__(self, reducers: Mapping[type, Reducer] | None = None) -> None:
        self._reducers = dict(reducers or {})
        self._free = [_StatefulPickler(self._reducers)]

    def dumps(
        self, obj: Any, *, main_by_value: bool = False, to: WorkerInfo | None = None, is_rehearsal: bool = False
    ) -> tuple[bytes, list[Slot]]:
        """Pickle and slots of an object, for the worker ``to``. Raises whatever pickling it raises.

        A rehearsal is not going to be sent, so reducers are not told that it is complete.
        """
        # list.pop and append are atomic, so that other threads may pickle too
        try:
            pickler = self._free.pop()
        except IndexError:
            pickler = _StatefulPickler(self._reducers)
        pickler.main_by_value = main_by_value
        pickler.to = to
        file = pickler.file
        try:
            # The C method: cloudpickle's own `dump` only explains recursion errors
            _dump(pickler, obj)
            slots = pickler.slots
            if slots:
                pickler.slots = []
            if pickler.packed:
                self._tell(pickler, is_rehearsal=is_rehearsal)
            return file.getvalue(), slots
        except BaseException:
            pickler.slots = []
            pickler.packed = []
            raise
        finally:
            pickler.clear_memo()
            pickler.globals_ref.clear()
            file.seek(0)
            file.truncate()
            self._free.append(pickler)

    @staticmethod
    def _tell(pickler: _StatefulPickler, *, is_rehearsal: bool) -> None:
        packed, pickler.packed = pickler.packed, []
        if not is_rehearsal:
            for callback in packed:
                callback()

    def dumps_call(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        *,
        main_by_value: bool,
        to: WorkerInfo | None = None,
    ) -> tuple[bytes, list[Slot]]:
        """The same for the arguments of a call; an error names the argument that cannot travel."""
        try:
            if kwargs:
                return self.dumps((args, kwargs), main_by_value=main_by_value, to=to)
            kinds = set(map(type, args))
            if Tensor in kinds and kinds <= _FLAT:
                tensors: list[Slot] = [arg for arg in args if type(arg) is Tensor]
                if len(tensors) == 1 or len(set(map(id, tensors))) == len(tensors):
                    # Tensors and scalars only: the tensors are cut out here, which is cheaper than reducing each
                    holes = tuple([_HOLE if type(arg) is Tensor else arg for arg in args])
                    return self.dumps(holes)[0], tensors
            return self.dumps(args, main_by_value=main_by_value, to=to)
        except Exception as error:
            raise self._explain(function, args, kwargs or {}, error, to) from error

    def dumps_result(
        self, value: Any, *, main_by_value: bool, to: WorkerInfo | None = None
    ) -> tuple[bytes, list[Slot]]:
        """The same for what a function returned. None is the empty pickle."""
        if value is None:
            return b"", []
        if type(value) is Tensor:
            return _JUST_A_HOLE, [value]
        return self.dumps(value, main_by_value=main_by_value, to=to)

    def _explain(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception, to: WorkerInfo | None
    ) -> SerializationError:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        for key, value in [*enumerate(args), *kwargs.items()]:
            try:
                self.dumps(value, to=to, is_rehearsal=True)
            except Exception as reason:  # noqa: BLE001 - whatever a user's __reduce__ may raise
                which = f"argument {key}" if isinstance(key, int) else f"argument {key!r}"
                return SerializationError(f"{which} of {name} ({type(value).__qualname__}) cannot be sent: {reason}")
        return SerializationError(f"the arguments of {name} cannot be sent: {error}")


def loads(payload: bytes | bytearray | memoryview, slots: list[Any]) -> Any:
    """The object of a pickle and its slots. Raises whatever unpickling it raises."""
    return pickle.loads(payload, buffers=slots)  # noqa: S301 - only ever reached after authentication
