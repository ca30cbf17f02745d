"""The successors of TorchScript: torch.export programs and torch.compile functions, as callables and as values."""

from __future__ import annotations

import hashlib
import io
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pickle import PickleBuffer
from types import FunctionType
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule

from arpc.private.torch import dynamic_setting, is_mutable
from arpc.torchscript.references import named_in_module, place_of
from arpc.wire.values.pickler import Pickling, importable_name

__all__ = ["ProgramCall", "module_of", "prepare_program", "reduce_function", "reduce_program"]

_MODULES: Final = 8
"""How many programs that were called are kept, so that the next call need not load them again."""
_COMPILED: Final = 64
"""How many functions that were compiled here for callers are kept: compiling takes long."""


def module_of(program: ExportedProgram) -> torch.nn.Module:
    """Return the module with which a program of `torch.export` is called.

    Created by `arpc.remote`, it stays on its worker, and can be called through its RRef any number of times::

        model = arpc.remote("worker1", arpc.torchscript.module_of, args=(program,))
        await model.rpc_sync().forward(x)
    """
    return program.module()


# -- programs


def reduce_program(program: ExportedProgram, _: Pickling) -> tuple[Any, ...]:
    """Pickle a program by value, with its graph and parameters."""
    return _program, (PickleBuffer(_save(program)),)


def _save(program: ExportedProgram) -> memoryview:
    file = io.BytesIO()
    torch.export.save(program, file)
    return file.getbuffer()


def _program(saved: Any) -> ExportedProgram:
    return torch.export.load(io.BytesIO(saved))


class ProgramCall:
    """A program in the form in which it is called remotely. It is loaded in the thread that runs it, not the loop's."""

    def __init__(self, saved: Any) -> None:
        self._saved = saved
        self.__name__ = "ExportedProgram"

    def __reduce__(self) -> tuple[Any, ...]:
        return ProgramCall, (PickleBuffer(self._saved),)

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return _modules.get(self._saved)(*args, **kwargs)


def prepare_program(
    program: ExportedProgram, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> tuple[ProgramCall, tuple[Any, ...]]:
    """Return the program, which is sent with the call, and the arguments."""
    return ProgramCall(_save(program)), (args, dict(kwargs or {}))


class _Modules:
    """The modules of the programs that were called last, by the hash of their content. Safe from any thread."""

    def __init__(self) -> None:
        self._loaded: OrderedDict[bytes, torch.nn.Module] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, saved: Any) -> torch.nn.Module:
        key = hashlib.sha256(saved).digest()
        with self._lock:
            module = self._loaded.get(key)
            if module is not None:
                self._loaded.move_to_end(key)
                return module
        # outside of the lock: two threads may load the same program, and one of the modules is used
        program = _program(saved)
        made = module_of(program)
        if _changes_itself(program):
            return made  # each call runs the program as it was sent, without the changes of the calls before
        with self._lock:
            module = self._loaded.setdefault(key, made)
            while len(self._loaded) > _MODULES:
                self._loaded.popitem(last=False)
        return module


def _changes_itself(program: ExportedProgram) -> bool:
    """Return whether a call may change buffers of the program. Also True for some that change only other tensors."""
    signature = program.graph_signature
    if signature.buffers_to_mutate:
        return True
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, GraphModule)]
    return bool(signature.buffers) and any(
        isinstance(node.target, OpOverload) and is_mutable(node.target) for graph in graphs for node in graph.nodes
    )


# A module depends on the content of its program alone, so all workers of the process share them
_modules: Final = _Modules()


# -- compiled functions


def reduce_function(function: FunctionType, pickling: Pickling) -> Any:
    """Pickle a function of `torch.compile`: by its name, or as the original function, to be compiled again.

    Other functions, and compiled ones that are found under the name of the original, are pickled as usual.
    """
    original = getattr(function, "_torchdynamo_orig_callable", None)
    if original is None or not hasattr(function, "get_compiler_config") or importable_name(function) is not None:
        return NotImplemented
    place = place_of(function, original, pickling)
    if place is not None:
        return named_in_module, place
    variables = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if "self" not in variables:
        return NotImplemented  # a version of torch that builds them differently
    context = variables["self"].cell_contents
    return _compiled, (original, _backend_of(context.callback), _is_fullgraph(context), dynamic_setting(context))


def _backend_of(callback: Any) -> Any:
    from torch._dynamo import eval_frame  # slow, but already imported: something was compiled

    # torch up to 2.10 at least has one function for both functions and backends
    innermost: Any = getattr(eval_frame, "innermost_backend", None) or eval_frame.innermost_fn
    return innermost(callback)


def _is_fullgraph(context: Any) -> bool:
    if hasattr(context, "fullgraph"):
        return bool(context.fullgraph)
    # in torch 2.8 it is the class of the frame converter
    return type(getattr(context.callback, "_torchdynamo_orig_callable", None)).__name__ == "ConvertFrameAssert"


_again: Final[OrderedDict[tuple[Any, ...], tuple[Any, Callable[..., Any]]]] = OrderedDict()


def _compiled(original: Callable[..., Any], backend: Any, fullgraph: bool, dynamic: bool | None) -> Callable[..., Any]:
    key = (original, fullgraph, dynamic)
    known = _again.get(key)
    if known is not None and known[0] == backend:
        _again.move_to_end(key)
        return known[1]
    # torch.compile itself, which calls this, would wrap the backend once more
    from torch._dynamo import optimize  # slow, and needed only for compiled functions

    made: Callable[..., Any] = optimize(backend=backend, nopython=fullgraph, dynamic=dynamic)(original)
    _again[key] = backend, made
    while len(_again) > _COMPILED:
        _again.popitem(last=False)
    return made
