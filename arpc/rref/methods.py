"""How to run what is called on an object that stays on its owner."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from arpc.agent.functions import Function

__all__ = ["prepared"]


@lru_cache(maxsize=1024)
def _template(function: Any) -> Function:
    return Function(function)


def prepared(function: Callable[..., Any]) -> Function:
    """A callable and how to run it. Finding that out takes longer than a short call, so it is remembered."""
    plain = getattr(function, "__func__", function)
    try:
        template = _template(plain)
    except TypeError:  # not hashable, or not callable: the message is right either way
        return Function(function)
    if plain is function:
        return template
    bound = Function.__new__(Function)
    bound.call = function
    bound.mode = template.mode
    bound.name = template.name
    bound.is_simple = template.is_simple
    bound.returns_future = template.returns_future
    return bound
