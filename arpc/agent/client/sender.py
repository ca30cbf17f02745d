"""Sends all requests: turns a call into a message that is sent, or waits to be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence, Sized
from threading import get_ident
from typing import Any, Final, NamedTuple, NoReturn

from arpc.agent.client.deadlines import Timeouts
from arpc.agent.client.future import Future
from arpc.agent.client.pending_calls import Call
from arpc.agent.codec import Codec
from arpc.agent.hooks.interceptor import Interceptor
from arpc.agent.peers.peer import Peer, unsendable
from arpc.agent.scope import WorkerScope, current_scope
from arpc.agent.server.functions import Preparation, name_of
from arpc.errors import OverloadedError, SerializationError, ShutdownError, not_run
from arpc.wire.messages import RequestFlag
from arpc.wire.metadata import Metadata, encode_metadata
from arpc.wire.values.content import Content
from arpc.wire.values.packing import Slot

__all__ = ["Prepared", "Sender", "as_arguments", "as_keywords"]

_KWARGS: Final = RequestFlag.KWARGS
_STREAM: Final = RequestFlag.STREAM
_NO_SLOTS: Final[list[Slot]] = []


class Prepared(NamedTuple):
    """The arguments of a call, pickled for one peer, see `Sender.prepare`."""

    pickle: bytes
    slots: list[Slot]
    is_named: bool
    """Whether the function is sent by its number, and not with the arguments."""
    function: Any
    """The function to call: the one given, or its replacement if it has a `Preparation`."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] | None


class Sender:
    """Sends the requests of one worker. Belongs to its loop."""

    def __init__(
        self,
        *,
        name: str,
        loop: asyncio.AbstractEventLoop,
        codec: Codec,
        timeouts: Timeouts,
        preparations: Mapping[type, Preparation] | None = None,
    ) -> None:
        self._name = name
        self._loop = loop
        self._thread: int | None = get_ident()
        """The loop's thread; None once the sender is closed, so that no thread may send."""
        self._codec = codec
        self._pickler = codec.pickler
        adding = [each for each in codec.interceptors if type(each).request_sent is not Interceptor.request_sent]
        self._interceptors = tuple((interceptor, interceptor.occasions) for interceptor in adding)
        self._occasions: tuple[Sized, ...] = tuple(occasions for _, occasions in self._interceptors)
        self._timeouts = timeouts
        self._preparations = dict(preparations or {})

    def send(self, call: Call) -> int:
        """Send a request, now or when there is room; returns its id. If it raises, nothing was sent."""
        if get_ident() != self._thread:
            self.refuse(call.function)
        peer: Peer = call.peer
        scope = current_scope.get()
        if scope is None or scope.__class__ is WorkerScope or call.is_internal:
            scope = None  # this code runs for no caller, so it has no deadline
            tick, call.timeout_ms, _ = self._timeouts.deadline(call.timeout)
        else:
            tick, call.timeout_ms, _ = self._timeouts.within(scope.deadline, call.timeout, call.called or call.function)
        args, kwargs = call.args, call.kwargs
        if args.__class__ is not tuple or (kwargs is not None and kwargs.__class__ is not dict):
            args, kwargs = call.args, call.kwargs = as_arguments(args), as_keywords(kwargs)
        number = call.function_id
        if not number:
            try:
                number = peer.function_ids[call.function]
            except (KeyError, TypeError):  # not known to the peer yet; or not hashable, so not a module's function
                number = self._define(call)
                args, kwargs = call.args, call.kwargs  # a preparation may have changed them
            call.function_id = number
        pickle, slots = b"", _NO_SLOTS
        if args or kwargs or not number:
            pickle, slots = self._pickle(peer, number, call.function, args, kwargs)
            call.args = call.kwargs = None
            if kwargs:
                call.flags |= _KWARGS
        metadata = call.metadata
        if any(self._occasions) and not call.is_internal:
            metadata = self._intercepted(call, slots)
        meta = encode_metadata(metadata) if metadata else b""
        content = self._codec.pack(slots, pickle, meta, peer.stager) if slots else Content(pickle, meta)
        call.size_bytes = content.size_bytes()
        if scope is not None:
            scope.call_begun(call.recipient)
        call_id = peer.calls.add(tick, call)
        if content.waits:
            self._submit_when_filled(peer, call_id, call, content)
        elif call.is_held:
            peer.hold(call_id, call, content)
        else:
            peer.submit(call_id, call, content)
        return call_id

    def _define(self, call: Call) -> int:
        """Return a number for a function new to the peer; 0 if the function travels with its arguments."""
        number: int = call.peer.define(call.function)
        if not number and call.args.__class__ is not Prepared:
            self._prepare(call)
        return number

    def _prepare(self, call: Call) -> None:
        """Replace a callable that is no Python function, such as a TorchScript function, by the one to send."""
        prepare = self._preparations.get(type(call.function))
        if prepare is None:
            return
        call.called = call.name
        call.function, call.args = prepare(call.function, tuple(call.args or ()), call.kwargs)
        call.kwargs = None
        if isinstance(call.recipient, Future):
            call.recipient.script_type = getattr(call.function, "returns", None)

    def _intercepted(self, call: Call, slots: list[Slot]) -> Metadata:
        """Return the metadata of a request. Each interceptor may add to it, and change the tensors."""
        metadata: Metadata = dict(call.metadata or ())
        for interceptor, occasions in self._interceptors:
            if occasions:
                added = interceptor.request_sent(call.peer.info, call.function, slots, call.flags & _STREAM != 0)
                if added is not None:
                    metadata[interceptor.key] = added
        return metadata

    def _submit_when_filled(self, peer: Peer, call_id: int, call: Call, content: Content) -> None:
        """Send a call once its tensors have been copied from devices. It may have ended by then."""

        def filled(failure: SerializationError | None) -> None:
            if call.recipient.done():
                peer.calls.pop(call_id)
            elif failure is not None:
                peer.calls.pop(call_id)
                call.recipient.set_exception(failure)
            else:
                try:
                    peer.submit(call_id, call, content)
                except OverloadedError as error:
                    call.recipient.set_exception(error)

        self._codec.when_filled(content, filled)

    # -- arguments

    def prepare(
        self,
        on_loop: Callable[[Callable[[], int]], int],
        peer: Peer,
        function: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
    ) -> Prepared | tuple[()]:
        """Pickle the arguments of a call, in any thread; returns () if there are none.

        Pass the result to `send` as the arguments, with the function and kwargs in it. Arguments that cannot be sent
        raise where the call is made, and the loop is free for other work meanwhile.
        """
        call = Call(peer, None, function, as_arguments(args), as_keywords(kwargs) if kwargs else None)
        try:
            number = peer.function_ids[function]
        except (KeyError, TypeError):
            number = on_loop(lambda: peer.define(function))
            if not number:
                self._prepare(call)
        arguments: Any = call.args
        if number and not arguments and not call.kwargs:
            return ()
        pickle, slots = self._pickle(peer, number, call.function, arguments, call.kwargs)
        return Prepared(pickle, slots, bool(number), call.function, arguments, call.kwargs)

    def _pickle(
        self, peer: Peer, number: int, function: Any, args: Any, kwargs: Mapping[str, Any] | None
    ) -> tuple[bytes, list[Slot]]:
        if args.__class__ is Prepared:
            if bool(number) is args.is_named:
                return args.pickle, list(args.slots)
            # The peer was replaced since, and functions travel to the new one in another way
            args = args.args
        if number:
            pickle, slots = self._pickler.dumps_call(
                function, args, kwargs, main_by_value=peer.main_by_value, to=peer.info
            )
        else:
            pickle, slots = self._pickle_with_function(peer, function, args, kwargs)
        if len(pickle) > self._codec.max_pickle_bytes:
            text = (
                f"the arguments of {name_of(function)} make a pickle of {len(pickle)} bytes, and at most "
                f"{self._codec.max_pickle_bytes} are taken: pass large data as tensors, or raise "
                f"RpcOptions.max_body_bytes"
            )
            raise not_run(SerializationError(text))
        return pickle, slots

    def _pickle_with_function(
        self, peer: Peer, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
    ) -> tuple[bytes, list[Slot]]:
        if not callable(function):
            raise TypeError(
                f"function should be callable, and {type(function).__qualname__} is not: pass the function itself, "
                f"not its call or its name, and its arguments as args=(...)"
            )
        by_value, to = peer.main_by_value, peer.info
        try:
            return self._pickler.dumps((function, (args, kwargs) if kwargs else args), main_by_value=by_value, to=to)
        except Exception as error:
            # raises an error that names the argument, if one was at fault
            self._pickler.dumps_call(function, args, kwargs, main_by_value=by_value, to=to)
            raise unsendable(function, error) from error

    # -- refusals

    @property
    def is_closed(self) -> bool:
        """Whether the worker shuts down, so that nothing is sent any more."""
        return self._thread is None

    def close(self) -> None:
        """Refuse all calls from now on."""
        self._thread = None

    def refuse(self, function: Any) -> NoReturn:
        """Raise the reason why nothing can be sent: `ShutdownError`, or `RuntimeError` in another thread."""
        if self._loop.is_closed():
            raise not_run(self.closed_loop())
        if self.is_closed:
            raise not_run(ShutdownError(f"worker {self._name!r} is shutting down"))
        raise RuntimeError(
            f"{name_of(function)} was called from a thread that is not worker {self._name!r}'s own: "
            f"use rpc_async(...).wait() there"
        )

    def closed_loop(self) -> ShutdownError:
        """Return the error of calls that are made after the end of the worker's loop."""
        return ShutdownError(
            f"the event loop of worker {self._name!r} is closed, so the worker can make no calls: use it before "
            f"its loop ends, as in `async with arpc.init_rpc(...)`, or start another worker on the loop that runs now"
        )


def as_arguments(args: Any) -> tuple[Any, ...]:
    """Return the positional arguments as a tuple. Raises `TypeError` for a str, say, which would be taken apart."""
    if args.__class__ is tuple or args.__class__ is Prepared:
        return args
    if args is None:
        return ()
    if isinstance(args, tuple | list):
        return tuple(args)
    raise TypeError(f"args must be a tuple of arguments, not {type(args).__qualname__}: write args=(value,)")


def as_keywords(kwargs: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the keyword arguments as a dict, None for None. Raises `TypeError` if they are no mapping."""
    if kwargs is None:
        return None
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a dict of arguments by name, not {type(kwargs).__qualname__}")
    return dict(kwargs)
