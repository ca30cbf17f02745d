"""Pickling of compiled TorchScript: by a name under which the peer finds its own object, else by value."""

from __future__ import annotations

import importlib
import sys
from functools import lru_cache
from pickle import PickleBuffer
from typing import Any, Final
from weakref import WeakKeyDictionary

from arpc import torchjit
from arpc.errors import ScriptError, SerializationError
from arpc.wire.values.pickler import Pickling
from arpc.wire.values.reducers import MAIN_NAMES

__all__ = ["named_in_module", "place_of", "reduce_script_error", "reduce_script_function", "reduce_script_module"]

_LOADED: Final = 64
"""How many functions that were received by value are kept, so that the next call need not load them again."""

_saved: WeakKeyDictionary[Any, bytes] = WeakKeyDictionary()


# -- objects that a module has under a name


def place_of(obj: Any, origin: Any, pickling: Pickling) -> tuple[str, str] | None:
    """Return the module and name by which the peer finds its own ``obj``; None if there are none.

    ``origin`` is the function that it was made from. The name of ``origin`` is tried first, then every other name in
    its module: after ``fast = torch.jit.script(slow)``, the object does not know its own name ``fast``.
    """
    module_name = getattr(origin, "__module__", None)
    module = sys.modules.get(module_name or "")
    if module is None or module_name is None or (module_name in MAIN_NAMES and pickling.main_by_value):
        return None
    qualname = getattr(origin, "__qualname__", "")
    if _walk(module, qualname) is obj:
        return module_name, qualname
    for name, value in list(vars(module).items()):
        if value is obj:
            return module_name, name
    return None


def _walk(module: Any, qualname: str) -> Any:
    found = module
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found


def named_in_module(module_name: str, qualname: str) -> Any:
    """Return the object that this process has under a name. Raises `SerializationError` if there is none."""
    module = sys.modules["__main__"] if module_name in MAIN_NAMES else importlib.import_module(module_name)
    found = _walk(module, qualname)
    if found is None:
        raise SerializationError(f"module {module_name!r} of this worker has no {qualname!r}")
    return found


# -- functions


def reduce_script_function(function: Any, pickling: Pickling) -> tuple[Any, ...]:
    """Pickle a function by its place in a module, else by value; a peer that has the same code uses its own."""
    origin = getattr(function, "_torchdynamo_inline", None)
    place = place_of(function, origin, pickling)
    if place is not None:
        return _script_function, (function.qualified_name, *place)
    saved = _saved.get(function)
    if saved is None:
        saved = _saved[function] = function.save_to_buffer()
    return _script_function_by_value, (function.qualified_name, function.code, saved)


def _script_function(qualified_name: str, module_name: str, qualname: str) -> Any:
    found = named_in_module(module_name, qualname)
    if not isinstance(found, torchjit.ScriptFunction):
        raise SerializationError(
            f"{qualified_name} is a TorchScript function where it was called, and {module_name}.{qualname} of this "
            f"worker is {type(found).__qualname__}"
        )
    return found


@lru_cache(maxsize=_LOADED)
def _script_function_by_value(qualified_name: str, code: str, saved: bytes) -> Any:
    own: Any = torchjit.compiled_unit().find_function(qualified_name)
    if own is not None and own.code == code:
        return own  # it uses the classes of this process
    return _Loaded(load_module(saved), qualified_name)


class _Loaded:
    """A function that was received by value. TorchScript saves a function as a method of a module."""

    def __init__(self, module: Any, qualified_name: str) -> None:
        self._module = module  # the method does not keep it alive
        self.qualified_name = qualified_name
        self.name = qualified_name.rpartition(".")[2]
        self.schema = module.forward.schema

    def __call__(self, *args: Any) -> Any:
        return self._module.forward(*args)


# -- modules


def reduce_script_module(module: Any, _: Pickling) -> tuple[Any, ...]:
    """Pickle a module by value, with its code and parameters."""
    return load_module, (PickleBuffer(module.save_to_buffer()),)


def load_module(saved: Any) -> Any:
    """Load a saved module. Raises `UnsupportedError` if torch has no TorchScript."""
    return torchjit.load_module(bytes(saved))


# -- errors


def reduce_script_error(error: Any, _: Pickling) -> tuple[Any, ...]:
    """Pickle an error of TorchScript as a `ScriptError`, which users can catch as a RuntimeError."""
    return ScriptError, (str(error),)
