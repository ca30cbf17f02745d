"""Reads requests: the functions that peers send, and the arguments of their calls."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from arpc.agent.scope import current_scope
from arpc.agent.server.functions import NAMING, Function
from arpc.agent.server.inbound import Inbound
from arpc.agent.server.remote_exceptions import NOT_THERE
from arpc.errors import NotAllowedError, ProtocolError, SerializationError
from arpc.user_errors import summary_of
from arpc.wire.messages import Message, RequestFlag
from arpc.wire.metadata import WINDOW, unpack_window

if TYPE_CHECKING:
    from arpc.agent.server.dispatcher import Dispatcher
    from arpc.agent.server.run import Run

__all__ = ["define", "prepare"]

_KWARGS: Final = int(RequestFlag.KWARGS)
# The most functions that a peer may define on one connection
_MAX_FUNCTIONS: Final = 1 << 16
_NO_SLOTS: Final[list[Any]] = []
_set_scope = current_scope.set


def prepare(run: Run) -> None:
    """Make a request the scope of its context, and unpickle its arguments there, unless that has been done.

    Interceptors and user code may use the context. Unpickling runs user code, which may raise anything.
    """
    _set_scope(run)
    message = run.message
    if message is None:
        return
    run.message = None
    codec, layout = run.host.codec, message.layout
    try:
        if not message.arg:
            codec.policy.check_code()
        slots = _NO_SLOTS if layout is None else layout.build(message.memory, message.buffers)
        if message.meta:
            if run.meta is None:
                run.meta = codec.metadata(message)
            if run.is_stream:
                run.credit = unpack_window(run.meta.pop(WINDOW, None))
            codec.request_received(run.inbound.caller, run.meta, slots)
        content = codec.content(message, slots, run.inbound.caller)
        if not message.arg:
            call, content = content
            results, run.function = run.function.results, Function(call)
            run.function.results = results  # shared, because it is not known if one was called before
        elif run.function.is_service:
            codec.policy.check_plain(content)
        if message.flags & _KWARGS:
            content, run.kwargs = content
        if content is not None:
            run.args = content
    except (AttributeError, ImportError, LookupError, StopIteration) as error:
        run.is_refused = True
        raise SerializationError(
            f"worker {run.host.name!r} cannot unpack the call: {summary_of(error)}. "
            f"What is sent by reference must be importable on the callee"
        ) from error
    except BaseException:
        run.is_refused = True
        raise
    if run.function.describe is not None:
        run.describe = partial(run.function.describe, run.host.worker, *run.args[:NAMING])
    if run.awaited_first is not None:
        run.function = _after(run.host, run.awaited_first, run.function)
    if run.handling is not None:
        run.function = run.host.observers.begin_handler(run, message)


def _after(host: Dispatcher, prerequisites: list[Awaitable[object]], function: Function) -> Function:
    """Return a function that awaits the prerequisites, and then calls ``function``."""

    async def wait_and_call(*args: Any, **kwargs: Any) -> Any:
        for prerequisite in prerequisites:
            await prerequisite
        return await host.call(function, args, kwargs)

    return Function.of_coroutine(wait_and_call, function.name, function.results)


def define(host: Dispatcher, inbound: Inbound, message: Message) -> None:
    """Register a function that a peer will call by number. Raises `ProtocolError` if there are too many."""
    functions, number = inbound.functions, message.arg
    if len(functions) > _MAX_FUNCTIONS:
        raise ProtocolError(f"worker {inbound.caller.name!r} calls more than {_MAX_FUNCTIONS} functions")
    if not number:
        raise ProtocolError("0 is the number of functions that come with their arguments")
    try:
        functions[number] = Function(host.context.copy().run(host.codec.function, message, inbound.caller))
    except NotAllowedError as error:
        functions[number] = Function.unknown(error)
    except BaseException as error:  # noqa: BLE001 - unpickling runs user code; any error is sent to the caller
        made = SerializationError(
            f"{NOT_THERE}{host.name!r}: {summary_of(error)}. "
            f"It must be importable there, or be passed as a lambda or closure, which travel by value"
        )
        made.__cause__ = error
        functions[number] = Function.unknown(made)
