"""Reads requests: the functions that peers send, and the arguments of their calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import Context
from functools import partial
from typing import Any, Final

from arpc.agent.codec import Codec
from arpc.agent.hooks.observers import Observers
from arpc.agent.server.functions import NAMING, Function
from arpc.agent.server.inbound import Inbound
from arpc.agent.server.remote_exceptions import NOT_THERE
from arpc.agent.server.run import Run
from arpc.errors import NotAllowedError, ProtocolError, SerializationError
from arpc.user_errors import summary_of
from arpc.wire.messages import Message, RequestFlag
from arpc.wire.metadata import WINDOW, unpack_window

__all__ = ["RequestReader"]

_KWARGS: Final = int(RequestFlag.KWARGS)
# By number, with each connection
_MAX_FUNCTIONS: Final = 1 << 16
_NO_SLOTS: Final[list[Any]] = []


class RequestReader:
    """Reads the requests of all peers of one worker. Unpickling runs user code, which may raise anything."""

    def __init__(
        self,
        worker: Any,
        name: str,
        context: Context,
        codec: Codec,
        observers: Observers,
        call: Callable[..., Awaitable[Any]],
    ) -> None:
        """``call`` runs a function in its own way, for a coroutine that waits for something first."""
        self._worker = worker
        self._name = name
        self._context = context
        self._codec = codec
        self._observers = observers
        self._call = call

    def unpack(self, run: Run, message: Message) -> None:
        """Build the arguments of a request, in its context: interceptors and user code may look at that."""
        run.message = None
        codec, layout = self._codec, message.layout
        try:
            if not message.arg:
                codec.policy.check_code()
            slots = _NO_SLOTS if layout is None else layout.build(message.body, message.buffers)
            if message.meta_end > message.meta_start:
                self._receive_metadata(run, message, slots)
            content = codec.content(message, slots, run.inbound.caller)
            if not message.arg:
                call, content = content
                run.function = Function(call)
                run.function.results = run.inbound.results_by_value
            elif run.function.is_service:
                codec.policy.check_plain(content)
            if message.flags & _KWARGS:
                run.args, run.kwargs = content
            else:
                run.args = content
        except (AttributeError, ImportError, LookupError, StopIteration) as error:
            run.is_refused = True
            raise SerializationError(
                f"worker {self._name!r} cannot unpack the call: {summary_of(error)}. "
                f"What is sent by reference must be importable on the callee"
            ) from error
        except BaseException:
            run.is_refused = True
            raise
        if run.function.describe is not None:
            run.describe = partial(run.function.describe, self._worker, *(run.args or ())[:NAMING])
        if run.awaited_first is not None:
            run.function = self._after(run.awaited_first, run.function)
        if run.handling is not None:
            run.function = self._observers.begin_handler(run, message)

    def _receive_metadata(self, run: Run, message: Message, slots: list[Any]) -> None:
        meta = run.meta
        if meta is None:
            meta = run.meta = self._codec.metadata(message)
        if run.is_stream:
            run.credit = unpack_window(meta.pop(WINDOW, None))
        self._codec.request_received(run.inbound.caller, meta, slots)

    def _after(self, prerequisites: list[Awaitable[object]], function: Function) -> Function:
        """A function that waits first."""

        async def wait_and_call(*args: Any, **kwargs: Any) -> Any:
            for prerequisite in prerequisites:
                await prerequisite
            return await self._call(function, args, kwargs)

        return Function.of_coroutine(wait_and_call, function.name, function.results)

    def define(self, inbound: Inbound, message: Message) -> None:
        """A peer sends a function that it will call by number. Raises `ProtocolError` if there are too many."""
        if len(inbound.functions) >= _MAX_FUNCTIONS:
            raise ProtocolError(f"worker {inbound.caller.name!r} calls more than {_MAX_FUNCTIONS} functions")
        functions, number = inbound.functions, message.arg
        try:
            functions[number] = Function(self._context.copy().run(self._codec.function, message, inbound.caller))
        except NotAllowedError as error:
            functions[number] = error
        except BaseException as error:  # noqa: BLE001 - unpickling runs user code; whatever it raises is the caller's
            made = SerializationError(
                f"{NOT_THERE}{self._name!r}: {summary_of(error)}. "
                f"It must be importable there, or be passed as a lambda or closure, which travel by value"
            )
            made.__cause__ = error
            functions[number] = made
