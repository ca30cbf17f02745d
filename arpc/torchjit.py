"""TorchScript, as far as this version of torch has it: arpc's access to ``torch.jit``.

torch has deprecated TorchScript, warns at every compilation since 2.15, and will remove it. Without it, the classes
here are placeholders without instances, `find_builtin` finds nothing, and functions that need TorchScript raise
`UnsupportedError`. Only TorchScript's own functions and modules depend on it.
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
            """A placeholder that is never raised."""

        class ScriptFunction:
            """A placeholder without instances."""

        class ScriptMethod:
            """A placeholder without instances."""

        class ScriptModule:
            """A placeholder without instances."""

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
    """Mark a function so that TorchScript leaves it to Python; without TorchScript, return it unchanged."""
    if not IS_AVAILABLE:
        return function
    marked: F = torch.jit.ignore(function)  # type: ignore[no-untyped-call]
    return marked


def script(module: torch.nn.Module) -> torch.nn.Module:
    """Compile a module. Raises `UnsupportedError` without TorchScript."""
    require()
    compiled: torch.nn.Module = torch.jit.script(module)
    return compiled


def compiled_unit() -> Any:
    """Return torch's registry of all that this process has compiled. Raises `UnsupportedError` without TorchScript."""
    require()
    return private_torch.compiled_unit()


def wrap_module(module: Any) -> Any:
    """Wrap a C++ ScriptModule in its Python class; return any other value unchanged."""
    if not isinstance(module, getattr(torch._C, "ScriptModule", ScriptModule)):
        return module
    from torch.jit._recursive import wrap_cpp_module

    return wrap_cpp_module(module)  # type: ignore[no-untyped-call]


def load_module(saved: bytes) -> Any:
    """Load a saved module. Unlike ``torch.jit.load`` this does not warn, because the sender chose TorchScript."""
    require()
    load: Any = torch._C.import_ir_module_from_buffer
    return wrap_module(load(torch._C.CompilationUnit(), saved, None, {}, False))


def type_of(annotation: Any) -> Any:
    """Return the TorchScript type of an annotation; None if there is none."""
    require()
    from torch._C import _jit_tree_views
    from torch.jit.annotations import try_ann_to_type

    nowhere = _jit_tree_views.SourceRangeFactory("", None, 0, 0).make_raw_range(0, 1)
    return try_ann_to_type(annotation, nowhere)  # type: ignore[no-untyped-call]
