"""TorchScript, as far as this torch has it: what arpc takes from ``torch.jit``, and from nowhere else.

torch has deprecated TorchScript, warns wherever something is compiled with it since 2.15, and will remove it. Without
it, the classes here are stand-ins that nothing is an instance of, no function is found to be a builtin, and the rest
raises `UnsupportedError`. Nothing but TorchScript's own functions and modules depends on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from arpc.errors import UnsupportedError
from arpc.private import torch as private_torch

__all__ = [
    "IS_AVAILABLE",
    "ScriptException",
    "ScriptFunction",
    "ScriptMethod",
    "ScriptModule",
    "compiled_unit",
    "find_builtin",
    "ignore",
    "load_module",
    "require",
    "script",
    "type_of",
    "wrap_module",
]

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:
    from torch._C import ScriptMethod
    from torch.jit import Error as ScriptException
    from torch.jit import ScriptFunction, ScriptModule

    IS_AVAILABLE = True
else:
    try:
        from torch._C import ScriptMethod
        from torch.jit import Error as ScriptException
        from torch.jit import ScriptFunction, ScriptModule
    except ImportError:
        IS_AVAILABLE = False

        class ScriptException(RuntimeError):  # noqa: N818 - torch calls it Error
            """Is never raised."""

        class ScriptFunction:
            """Has no instances."""

        class ScriptMethod:
            """Has no instances."""

        class ScriptModule:
            """Has no instances."""

    else:
        IS_AVAILABLE = True


def require() -> None:
    """Raise `UnsupportedError` if this torch has no TorchScript."""
    if not IS_AVAILABLE:
        raise UnsupportedError(
            f"torch {torch.__version__} has no TorchScript (torch.jit): use plain functions and modules, programs of "
            f"torch.export or functions of torch.compile"
        )


def _find_nothing(_: Any) -> str | None:
    return None


def _find_function() -> Callable[[Any], str | None]:
    try:
        from torch.jit._builtins import _find_builtin
    except ImportError:
        return _find_nothing
    return _find_builtin


find_builtin: Callable[[Any], str | None] = _find_function()
"""The name of the operator behind a function such as ``torch.add``, as in ``aten::add``; None if none is known."""


def ignore(function: F) -> F:
    """Mark a function that TorchScript leaves to Python."""
    if not IS_AVAILABLE:
        return function
    marked: F = torch.jit.ignore(function)  # type: ignore[no-untyped-call]
    return marked


def script(module: torch.nn.Module) -> torch.nn.Module:
    """Compile a module."""
    require()
    compiled: torch.nn.Module = torch.jit.script(module)
    return compiled


def compiled_unit() -> Any:
    """Where torch keeps what this process has compiled."""
    require()
    return private_torch.compiled_unit()


def wrap_module(module: Any) -> Any:
    """A module of C++ as the class of Python; any other value as it is."""
    if not isinstance(module, getattr(torch._C, "ScriptModule", ScriptModule)):
        return module
    from torch.jit._recursive import wrap_cpp_module

    return wrap_cpp_module(module)  # type: ignore[no-untyped-call]


def load_module(saved: bytes) -> Any:
    """The module that was saved. Unlike ``torch.jit.load`` this does not warn, for the sender chose TorchScript."""
    require()
    load: Any = torch._C.import_ir_module_from_buffer
    return wrap_module(load(torch._C.CompilationUnit(), saved, None, {}, False))


def type_of(annotation: Any) -> Any:
    """The type that stands for an annotation; None if there is none."""
    require()
    from torch._C import _jit_tree_views
    from torch.jit.annotations import try_ann_to_type

    nowhere = _jit_tree_views.SourceRangeFactory("", None, 0, 0).make_raw_range(0, 1)
    return try_ann_to_type(annotation, nowhere)  # type: ignore[no-untyped-call]
