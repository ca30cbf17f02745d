"""`async_execution`, as torch has it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from arpc.agent.server.functions import async_execution as mark
from arpc.torchjit import ScriptFunction

__all__ = ["async_execution"]


def async_execution(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that returns a ``torch.futures.Future``: the caller gets the value of that future."""
    if isinstance(fn, ScriptFunction):
        return mark(fn)

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        if not isinstance(result, torch._C.Future):
            raise RuntimeError(  # noqa: TRY004 - torch's own, which programs catch
                "Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
                f"but got {type(result).__name__}"
            )
        return result

    wrapper._wrapped_async_rpc_function = fn  # type: ignore[attr-defined]  # noqa: SLF001 - torch's mark, and arpc's
    return wrapper
