"""The signatures of TorchScript functions, and the check of arguments against them, with torch's own error texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from arpc.errors import NotReadyError, ScriptError
from arpc.torchjit import ScriptFunction
from arpc.torchscript.types import to_python

__all__ = ["Completed", "Signature", "signature_of"]


class Completed(NamedTuple):
    """The value of a future, as it is sent to a worker that makes another future of it."""

    value: Any


class Signature:
    """The schema of one function.

    Arguments are checked by a call of a function with the same name and parameters that does nothing: torch checks them
    as it would for the real function, and raises the same errors.
    """

    def __init__(self, function: Any) -> None:
        schema = function.schema
        arguments = list(schema.arguments)
        if not isinstance(function, ScriptFunction):
            del arguments[0]  # a function that was received by value is a method: this is its module
        if len(schema.returns) != 1:
            raise ScriptError(
                f"{function.name} returns {len(schema.returns)} values, and a TorchScript function that is called "
                f"remotely returns one: {schema}"
            )
        self.names = tuple(argument.name for argument in arguments)
        self.defaults = {item.name: item.default_value for item in arguments if item.has_default_value()}
        self.returns = schema.returns[0].type
        self.returns_future = self.returns.kind() == "FutureType"
        self._declaration = str(schema)
        # for a future, its value is sent
        types = [_awaited(argument.type) for argument in arguments]
        self._futures = {
            place: _future_maker(type_)
            for place, (type_, argument) in enumerate(zip(types, arguments, strict=True))
            if argument.type.kind() == "FutureType"
        }
        self._check = _function(function.name, zip(self.names, types, strict=True), None)
        self._to_python = to_python(self.returns)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> tuple[Any, ...]:
        """Return all arguments in their order, defaults included. Raises `ScriptError` if they do not fit."""
        missing = self.names[len(args) :]
        named = {**{name: self.defaults[name] for name in missing if name in self.defaults}, **(kwargs or {})}
        if self._futures:
            args = tuple(_value_of(arg) if place in self._futures else arg for place, arg in enumerate(args))
            places = [self.names[place] for place in self._futures]
            named = {name: _value_of(arg) if name in places else arg for name, arg in named.items()}
        try:
            self._check(*args, **named)
        except RuntimeError as error:
            raise ScriptError(str(error).replace(str(self._check.schema), self._declaration)) from None
        bound = (*args, *(named[name] for name in missing))
        if self._futures:
            bound = tuple(Completed(arg) if place in self._futures else arg for place, arg in enumerate(bound))
        return bound

    def received(self, args: Sequence[Any]) -> Sequence[Any]:
        """Convert the arguments of `bind` on the callee: values of futures become futures again."""
        if not self._futures:
            return args
        return [self._futures[place](arg.value) if place in self._futures else arg for place, arg in enumerate(args)]

    def result(self, value: Any) -> Any:
        """Convert the result of the function to the user's classes."""
        return value if self._to_python is None else self._to_python(value)


def _awaited(type_: Any) -> Any:
    return type_.getElementType() if type_.kind() == "FutureType" else type_


def _function(name: str, parameters: Any, build: Callable[[Any, list[Any]], Any] | None) -> Any:
    """Make a TorchScript function with these parameters; ``build`` makes its return value, by default None."""
    graph: Any = torch._C.Graph()
    inputs = []
    for parameter, type_ in parameters:
        value = graph.addInput(parameter)
        value.setType(type_)
        inputs.append(value)
    if build is None:
        node = graph.create("prim::Constant")
        node.output().setType(torch._C.NoneType.get())
        graph.appendNode(node)
        graph.registerOutput(node.output())
    else:
        graph.registerOutput(build(graph, inputs))
    return torch._C.CompilationUnit().create_function(name, graph, False)


def _future_maker(type_: Any) -> Callable[[Any], Any]:
    """Make a function that wraps a value in a future of that type: torch makes these only inside TorchScript."""

    def fork(graph: Any, inputs: list[Any]) -> Any:
        inner: Any = torch._C.Graph()
        value = inner.addInput("value")
        value.setType(type_)
        inner.registerOutput(value)
        node = graph.create("prim::fork", inputs, 1)
        node.g_("Subgraph", inner)
        node.output().setType(torch._C.FutureType(type_))
        graph.appendNode(node)
        return node.output()

    made: Callable[[Any], Any] = _function("completed", [("value", type_)], fork)
    return made


def _value_of(future: Any) -> Any:
    """Return the value of a future that is an argument. Raises `NotReadyError` if the future is not done."""
    if not isinstance(future, asyncio.Future | torch._C.Future):
        return future  # the check rejects it, unless it is the value itself
    if not future.done():
        raise NotReadyError("a future that is an argument of a TorchScript function is not done: await it first")
    return future.result() if isinstance(future, asyncio.Future) else future.value()


_known: WeakKeyDictionary[Any, Signature] = WeakKeyDictionary()


def signature_of(function: Any) -> Signature:
    """Return the signature of a function, which is made once."""
    known = _known.get(function)
    if known is None:
        known = _known[function] = Signature(function)
    return known
