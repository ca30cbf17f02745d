"""Calls of TorchScript functions: checked by the caller, run by the callee."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from arpc.agent.server.functions import async_execution, name_of, returns_futures
from arpc.errors import ScriptError, SerializationError
from arpc.torchscript.signatures import signature_of
from arpc.torchscript.types import text_of

__all__ = ["ScriptCall", "prepare_script_function", "refuse_script_method"]


class ScriptCall:
    """A TorchScript function in the form in which it is called remotely. Takes all of its arguments, in their order.

    TorchScript's interpreter releases the GIL: in its thread, a function blocks neither the loop nor other threads.
    """

    keeps_modules = True
    """A ScriptModule that it returns to `remote` stays on its owner: its type is the schema's, see `RRef`."""

    def __init__(self, function: Any, is_async: bool = False) -> None:
        self.function = function
        self.signature = signature_of(function)
        self.returns = self.signature.returns
        self.__name__ = str(function.qualified_name)
        self._is_async = is_async
        if is_async or self.signature.returns_future:
            async_execution(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return ScriptCall, (self.function, self._is_async)

    def __call__(self, *args: Any) -> Any:
        signature = self.signature
        if self._is_async and not signature.returns_future:
            raise ScriptError(
                f"Async functions must return an IValue of Future type, but got {text_of(signature.returns)}"
            )
        return signature.result(self.function(*signature.received(args)))


def prepare_script_function(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> tuple[ScriptCall, tuple[Any, ...]]:
    """Check the arguments on the caller, before anything is sent. Raises `ScriptError`."""
    call = ScriptCall(function, returns_futures(function))
    return call, call.signature.bind(args, kwargs)


def refuse_script_method(function: Any, _: tuple[Any, ...], __: Mapping[str, Any] | None) -> NoReturn:
    """Raise `SerializationError`: a method of a local module cannot run on another worker."""
    raise SerializationError(
        f"{name_of(function)} is a method of a ScriptModule, which cannot be pickled apart from it: make the module on "
        f"the worker with arpc.remote, and call its method through the RRef"
    )
