"""How to run what is called on an object that stays on its owner."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import BuiltinMethodType, FunctionType, MethodDescriptorType
from typing import Any

from arpc.agent.server.functions import Function

__all__ = ["bound", "template_of"]


@lru_cache(maxsize=1024)
def _template(function: Any) -> Function:
    return Function(function)


def template_of(method: Callable[..., Any]) -> Function:
    """How to run a method, or any callable. Finding that out takes longer than a short call, so it is remembered.

    But of none that holds an object, as an instance does that can be called: it would be kept with what is remembered.
    """
    if isinstance(method, BuiltinMethodType):
        method = getattr(type(method.__self__), method.__name__, method)
    plain = getattr(method, "__func__", method)
    if isinstance(plain, FunctionType | MethodDescriptorType):
        return _template(plain)
    return Function(method)


def bound(method: Callable[..., Any], template: Function) -> Function:
    """The method itself, to be run like its template."""
    return template if template.call is method else template.like(method)
