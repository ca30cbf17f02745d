"""How single objects are pickled where pickle alone would not do.

- A tensor becomes a *hole*, whose content is kept beside the pickle. So does the memory of a large numpy array.
- Functions and classes that the peer can import are sent by name, others (lambdas, closures, notebook cells) by value.
- ``__main__`` counts as importable when the peer runs the same script, so that its globals are the peer's own.
- Other parts of arpc have *reducers* for their types, which the code that makes the pickler passes in.
"""

from __future__ import annotations

import copyreg
import pickle
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pickle import PickleBuffer
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final, Protocol, cast

import cloudpickle
import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from arpc.errors import SerializationError
from arpc.ids import WorkerInfo
from arpc.private.torch import make_subclass, without_torch_dispatch

__all__ = [
    "FILL",
    "FILL_PARAMETER",
    "HOLE",
    "IS_REGISTERED",
    "MAIN_NAMES",
    "MEMO",
    "NUMBERS",
    "PREFIX",
    "SPELLED_OUT",
    "DispatchTable",
    "HolePickler",
    "MainName",
    "NamesOnlyPickler",
    "Pickling",
    "Reducer",
    "as_subclass",
    "importable_name",
    "make_instance",
    "reduce_array",
    "reduce_number",
    "reduce_tensor_subclass",
    "spelled_out",
]


class Pickling(Protocol):
    """The pickle that is being made, as a reducer sees it."""

    to: WorkerInfo | None
    """The worker that receives the pickle; None if the receiver is not a worker."""
    main_by_value: bool
    """Whether the receiver does not run this script, and so lacks the objects that its ``__main__`` defines."""
    packed: list[Callable[[], None]]
    """Callbacks that are called once the pickle is complete, but not if pickling fails or the pickle is not sent."""


Reducer = Callable[[Any, Pickling], tuple[Any, ...] | str]
"""Like ``__reduce__``, but a function of the object and the pickling. `NotImplemented` means: pickle it as usual."""

MAIN_NAMES: Final = ("__main__", "__mp_main__")
"""The names of the script's module: its own, and that of multiprocessing in a spawned child."""

# It is writable because pickle marks read-only memory, and unpickling would then read the hole's content as memory.
HOLE: Final = PickleBuffer(bytearray())
"""Stands in a pickle for an object that is sent beside it. All holes can be this same object."""


def _fill(slot: Any, dtype: str = "", shape: tuple[int, ...] | None = ()) -> Any:
    if not dtype:
        return slot
    if shape is None:
        return np.frombuffer(slot, _DTYPES_BY_NAME[dtype])[0]
    return np.ndarray(shape, _DTYPES_BY_NAME[dtype], slot)


_IN_PICKLE_BYTES: Final = 8 * 1024
"""The largest array whose memory is part of the pickle; that of a larger one is a hole."""
_ARRAY_DTYPES: Final = {np.dtype(name): np.dtype(name).str for name in "?bBhHiIlLqQefdFD"}
_NUMBER_DTYPES: Final = {dtype.type: name for dtype, name in _ARRAY_DTYPES.items()}
NUMBERS: Final = frozenset(_NUMBER_DTYPES)
"""The types of numpy's numbers that `reduce_number` takes."""
_DTYPES_BY_NAME: Final = {name: dtype for dtype, name in _ARRAY_DTYPES.items()}
FILL: Final = _fill
"""Called with the content of a hole, returns it (an object cannot be reduced to a hole alone); with memory, dtype and
shape, an array over that memory; without a shape, a number of numpy."""

# -- how pickles begin

_EXTENSION_CODE: Final = 240
PREFIX: Final = pickle.PROTO + b"\5" + pickle.EXT1 + bytes([_EXTENSION_CODE]) + pickle.MEMOIZE + pickle.POP
"""The beginning of each pickle that may have holes: makes `FILL` the first object in its memo.

An extension code saves both sides the lookup of a name. Code 240 is one of those that Python's registry leaves to
private use. It is part of the wire format.
"""
MEMO: Final = {id(_fill): (0, _fill)}
"""The memo of a pickler that has written the prefix."""
SPELLED_OUT: Final = (
    pickle.PROTO
    + b"\5"
    + b"".join(pickle.SHORT_BINUNICODE + bytes([len(name)]) + name.encode() for name in (__name__, "_fill"))
    + pickle.STACK_GLOBAL
    + pickle.MEMOIZE
    + pickle.POP
)
"""The prefix with a name in place of the extension code."""


def spelled_out(payload: bytes | bytearray | memoryview) -> bytes:
    """Return a pickle with a name in place of the extension code of the prefix."""
    data = bytes(payload)
    return SPELLED_OUT + data[len(PREFIX) :] if data.startswith(PREFIX) else data


def _register() -> bool:
    try:
        copyreg.add_extension(__name__, "_fill", _EXTENSION_CODE)
    except ValueError:
        return False
    return True


IS_REGISTERED: Final = _register()
"""False if another library has taken the extension code: then pickles are `spelled_out` before they are read."""


# -- the pickler for code


class DispatchTable(dict[type, Callable[[Any], Any]]):
    """The reducers by type. For a type that is not in it, ``find`` is called each time."""

    def __init__(self, known: Mapping[Any, Callable[[Any], Any]], find: Callable[[type], Callable[[Any], Any]]) -> None:
        super().__init__(known)
        self._find = find

    def __missing__(self, cls: type) -> Callable[[Any], Any]:
        return self._find(cls)


class NamingPickling(Pickling, Protocol):
    """The pickle that a `HolePickler` writes to."""

    table: DispatchTable

    def write(self, chunk: bytes, /) -> object: ...

    def reduced(self, obj: Any, /) -> Any: ...


class HolePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles functions and classes without a name by value.

    It runs Python code for every object. `wire.values.pickler` uses it for objects that pickle's own pickler cannot
    handle, and gives it a table for all objects that are neither functions nor classes.
    """

    # without the reducers of `copyreg`: cloudpickle's own ChainMap takes 2 us for each object
    dispatch_table = cloudpickle.Pickler.dispatch_table.maps[0]

    def __init__(self, pickling: NamingPickling, buffer_found: Callable[[PickleBuffer], object]) -> None:
        self.dispatch_table = pickling.table  # before pickle's own constructor, which reads it
        super().__init__(pickling, protocol=5, buffer_callback=buffer_found)
        self.main_by_value = pickling.main_by_value
        self._reduced = pickling.reduced

    def reducer_override(self, obj: Any) -> Any:
        reduced = self._reduced(obj)
        if reduced is not NotImplemented:
            return reduced
        if isinstance(obj, Tensor) or getattr(obj, "__qualname__", None) is None:
            return NotImplemented  # the table handles these
        if getattr(obj, "__module__", None) in MAIN_NAMES:
            return self._reduce_of_main(obj)
        if type(obj) is FunctionType or isinstance(obj, type):
            return super().reducer_override(obj)
        return NotImplemented

    def _reduce_of_main(self, obj: Any) -> Any:
        if not self.main_by_value and importable_name(obj) is not None:
            return _from_main, (obj.__qualname__,)
        module = sys.modules.get("__mp_main__")
        if module is not None and obj.__module__ == "__mp_main__":
            # cloudpickle takes this for an importable module, but no other process can import it
            cloudpickle.register_pickle_by_value(module)
        return super().reducer_override(obj)


class NamesOnlyPickler(HolePickler):
    """For peers that accept no code: refuses objects without a name here, with a clearer error than the peer's."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is FunctionType or isinstance(obj, type):
            if importable_name(obj) is None:
                raise SerializationError(
                    f"{obj!r} has no name that others can import, and in allow-list mode no code is sent"
                )
            if self.main_by_value and obj.__module__ in MAIN_NAMES:
                raise SerializationError(
                    f"{obj.__qualname__} is of this worker's script, which is not that of the other, and in allow-list "
                    f"mode no code is sent: define it in a module that both import"
                )
        return super().reducer_override(obj)


# -- tensors of subclasses, and arrays


def reduce_tensor_subclass(obj: Tensor, add_slot: Callable[[Tensor], None]) -> Any:
    """Reduce a tensor of a subclass; returns `NotImplemented` to leave it to the class's own ``__reduce_ex__``."""
    cls = type(obj)
    if cls.__reduce_ex__ not in {Tensor.__reduce_ex__, Parameter.__reduce_ex__}:
        return NotImplemented
    if hasattr(cls, "__tensor_flatten__"):
        names, context = obj.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: getattr(obj, name) for name in names}
        return fill_wrapper, (cls, inner, context, tuple(obj.shape), tuple(obj.stride()), obj.requires_grad)
    if _has_no_memory(obj):
        return NotImplemented  # it consists of its attributes only, and torch can rebuild it
    # as it is in memory, whatever its class does when an operator of torch is called with it
    with torch._C.DisableTorchFunctionSubclass(), _without_dispatch(cls):
        state = obj.__getstate__()
        # the parameter itself, so that code which reads the slots (autograd does) finds the leaf
        add_slot(obj if issubclass(cls, Parameter) else obj.as_subclass(Tensor))
        return _fill_subclass, (cls, HOLE, obj.requires_grad, state)


def reduce_array(array: np.ndarray[Any, np.dtype[Any]]) -> Any:
    """Reduce a plain array to its memory, its dtype and its shape. numpy pickles the others, and their dtypes."""
    name = _ARRAY_DTYPES.get(array.dtype)
    if name is None or not array.flags.c_contiguous:
        return array.__reduce_ex__(5)
    if array.nbytes > _IN_PICKLE_BYTES:
        return _fill, (PickleBuffer(cast("Any", array)), name, array.shape)
    # Memory beside the pickle has to be described, which takes longer than some copies of a small array
    memory = array.tobytes()
    return _fill, (bytearray(memory) if array.flags.writeable else memory, name, array.shape)


def reduce_number(number: np.generic) -> Any:
    """Reduce a number of numpy to its memory and its dtype."""
    return _fill, (number.tobytes(), _NUMBER_DTYPES[type(number)], None)


def _has_no_memory(obj: Tensor) -> bool:
    """Whether a tensor is a wrapper: its class implements operators, by means of other tensors that it refers to."""
    if type(obj).__torch_dispatch__ is Tensor.__torch_dispatch__:
        return False
    with torch._C.DisableTorchFunctionSubclass(), _without_dispatch(type(obj)):
        try:
            return obj.data_ptr() == 0
        except RuntimeError:
            return True


def _without_dispatch(cls: type[Tensor]) -> AbstractContextManager[object]:
    """Return a context in which operators of torch take a tensor of a class as it is in memory."""
    if cls.__torch_dispatch__ is Tensor.__torch_dispatch__:
        return _AS_EVER
    return without_torch_dispatch()


_AS_EVER: Final = nullcontext()


# -- functions that pickles name: they run in the process that unpickles


def _fill_parameter(tensor: Tensor, requires_grad: bool) -> Tensor:
    # a tensor that autograd has recorded has a history here, and a parameter cannot have one
    return tensor if tensor.grad_fn is not None else make_subclass(Parameter, tensor, requires_grad)


FILL_PARAMETER: Final = _fill_parameter
"""Called with the tensor of a hole, returns a parameter; the tensor itself if autograd has recorded it."""


def as_subclass(cls: type[Tensor], tensor: Tensor, requires_grad: bool) -> Tensor:
    """Return a received tensor as an instance of a subclass. It keeps its autograd history, if it has one here."""
    return make_subclass(cls, tensor, requires_grad) if tensor.grad_fn is None else tensor.as_subclass(cls)


def _fill_subclass(cls: type[Tensor], tensor: Tensor, requires_grad: bool, state: Any) -> Tensor:
    made: Any = as_subclass(cls, tensor, requires_grad)
    if cls.__setstate__ is not Tensor.__setstate__:
        made.__setstate__(state)
        return cast("Tensor", made)
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    made.__dict__.update(attributes or {})
    for name, value in (slots or {}).items():
        setattr(made, name, value)
    return cast("Tensor", made)


def make_instance(cls: Any, *args: Any) -> Any:
    """Do what pickle's NEWOBJ does, for a class that the pickle has as a `MainName`."""
    return cls.__new__(cls, *args)


class MainName:
    """Stands in a pickle for an object of ``__main__``: the peer looks the name up in its own script."""

    __slots__ = ("qualname",)

    def __init__(self, qualname: str) -> None:
        self.qualname = qualname

    def __call__(self) -> None:
        """Never called: pickle checks that an object which the receiver calls is callable here."""

    def __reduce__(self) -> Any:
        return _from_main, (self.qualname,)


def fill_wrapper(
    cls: Any,
    inner: dict[str, Tensor],
    context: Any,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> Tensor:
    made = cast("Tensor", cls.__tensor_unflatten__(inner, context, torch.Size(size), stride))
    return made.requires_grad_() if requires_grad and made.grad_fn is None else made


def _from_main(qualname: str) -> Any:
    """Return the object of that name in this process's own script. Raises `SerializationError` if there is none."""
    main = sys.modules["__main__"]
    found: Any = main
    for name in qualname.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise SerializationError(
                f"{qualname!r} is not in this worker's __main__ ({getattr(main, '__file__', 'not a file')}). Define it "
                f"at the top level of the script, outside of `if __name__ == '__main__':`, or in a module"
            ) from None
    return found


# -- names


def importable_name(obj: Any) -> tuple[str, str] | None:
    """Return the module and qualified name from which this very object can be imported, or None."""
    module_name = getattr(obj, "__module__", None)
    qualname = getattr(obj, "__qualname__", None)
    if not isinstance(module_name, str) or not isinstance(qualname, str):
        return None
    module = sys.modules.get(module_name)
    found: Any = module
    for name in qualname.split("."):
        found = getattr(found, name, None)
    if found is obj:
        return module_name, qualname
    # the qualified names of torch's operators have a hidden class in them, but their module has them, too
    name = getattr(obj, "__name__", "")
    if isinstance(obj, BuiltinFunctionType) and getattr(module, name, None) is obj:
        return module_name, name
    return None
