"""Durations of all calls and handlers, at the lowest price: for counting, all the time.

`agent.observers` tell everything of a request, and let others change what happens around it; for that requests leave
the short ways. Here each keeps its own way and only the clock is read at both ends of it, so a worker that is metered
costs a fraction of one that is observed. While nobody meters, nothing of this is in place.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from arpc.agent.functions import Function
from arpc.agent.future import Future
from arpc.agent.links import Link
from arpc.agent.peers import Peer
from arpc.agent.requests import Inbound, Run
from arpc.ids import WorkerInfo
from arpc.options import UNSET, Unset
from arpc.wire.messages import Message
from arpc.wire.protocol import Direct
from arpc.wire.tensors import Slot

__all__ = ["Meter", "Metering"]

_now = time.perf_counter_ns


class Meter(Protocol):
    """Hears how long things took. Called on the loop; must not raise."""

    def call_ended(self, peer: str, function: Any, duration_ns: int, error: BaseException | None) -> None:
        """A call has its result, or its error. ``function`` is what was called; of a feature its message class."""

    def handler_ended(self, caller: str, function: str, duration_ns: int) -> None:
        """A request was answered, whatever the answer is."""

    def handler_failed(self, caller: str, function: str, error: BaseException) -> None:
        """It will be answered with an error."""


class Metering:
    """The ways of one agent, with a clock at both ends. Calls are timed by their caller, handlers where they run."""

    def __init__(
        self,
        meter: Meter,
        peers: Mapping[Any, Peer],
        begin: Callable[..., int],
        call_unknown: Callable[..., Awaitable[Any]],
        request_packed: Callable[..., Future[Any]],
        request_plain: Callable[..., int],
        check_loop: Callable[[], None],
        nameless: Collection[int] = (),
    ) -> None:
        """``begin`` and so on are the agent's own, which know nothing of meters.

        ``nameless`` are the types of messages that name no function, whatever number they bring.
        """
        self._meter = meter
        self._peers = peers
        self._nameless = nameless
        self._begin = begin
        self._call_unknown = call_unknown
        self._request_packed = request_packed
        self._request_plain = request_plain
        self._check_loop = check_loop

    # -- calls

    async def call_and_wait(
        self,
        to: str | int | WorkerInfo,
        function: Callable[..., Any],
        args: Sequence[Any] | None = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | Unset = UNSET,
    ) -> Any:
        """In the place of `Agent.call_and_wait`."""
        try:
            peer = self._peers[to]
        except (KeyError, TypeError):
            return await self._call_unknown(to, function, args, kwargs, timeout)
        if peer.must_be_asked_for:
            return await self._call_unknown(to, function, args, kwargs, timeout)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        began_ns = _now()
        call_id = 0
        error: BaseException | None = None
        try:
            call_id = self._begin(peer, future, function, args, kwargs, timeout)
            return await future
        except asyncio.CancelledError as cancelled:
            peer.cancel(call_id)
            error = cancelled
            raise
        except BaseException as raised:
            error = raised
            if isinstance(raised, RuntimeError):
                self._check_loop()
            raise
        finally:
            self._meter.call_ended(peer.info.name, function, _now() - began_ns, error)
            del future, error  # an exception refers to this frame, and so to the arguments

    def begin(self, peer: Peer, future: asyncio.Future[Any], function: Any, *arguments: Any, **options: Any) -> int:
        """In the place of `Agent.begin`, for those who wait for the future in their own way."""
        if options.get("riders") is not None:
            return self._begin(peer, future, function, *arguments, **options)  # the same call again, for observers
        began_ns = _now()
        call_id = self._begin(peer, future, function, *arguments, **options)
        future.add_done_callback(partial(self._future_done, peer, function, began_ns))
        return call_id

    def request_packed(
        self, message: type[Message], peer: Peer, payload: bytes, slots: list[Slot], timeout_s: float | Unset
    ) -> Future[Any]:
        """In the place of `Agent.request_packed`."""
        began_ns = _now()
        future = self._request_packed(message, peer, payload, slots, timeout_s)
        future.add_done_callback(partial(self._future_done, peer, message, began_ns))
        return future

    def request_plain(
        self,
        message: type[Message],
        peer: Peer,
        payload: bytes,
        timeout_s: float,
        future: asyncio.Future[Any],
        is_private: bool = False,
    ) -> int:
        """In the place of `Agent.request_plain`. Its future is not private then: this waits for it, too."""
        began_ns = _now()
        call_id = self._request_plain(message, peer, payload, timeout_s, future)
        if call_id:
            future.add_done_callback(partial(self._future_done, peer, message, began_ns))
        return call_id

    def _future_done(self, peer: Peer, function: Any, began_ns: int, future: asyncio.Future[Any]) -> None:
        duration_ns = _now() - began_ns
        # not `exception`, which would count as looked at
        error = asyncio.CancelledError() if future.cancelled() else getattr(future, "_exception", None)
        self._meter.call_ended(peer.info.name, function, duration_ns, error)

    # -- handlers

    def watch(self, inbound: Inbound) -> None:
        """Hear of the end of requests that do not end at once."""
        inbound.ended = partial(self._ended, inbound)

    def take(self, inbound: Inbound, message: type[Message], take: Direct) -> Direct:
        """A taker of brief messages, timed."""
        functions = {} if int(message.type) in self._nameless else inbound.functions
        running, waiting, began = inbound.running, inbound.waiting, inbound.began_ns
        ended = self._meter.handler_ended

        def metered(id_: int, arg: int, timeout_ms: int, payload: bytes | bytearray) -> None:
            began_ns = _now()
            take(id_, arg, timeout_ms, payload)
            if id_ in running or id_ in waiting:
                began[id_] = began_ns
                return
            function = functions.get(arg)
            name = function.name if function.__class__ is Function else message.__name__
            ended(inbound.caller.name, name, _now() - began_ns)

        return metered

    def handle(self, handle: Callable[[Link, Message], None], link: Link, message: Message) -> None:
        """Any other request, timed."""
        began_ns = _now()
        handle(link, message)
        inbound = link.inbound
        inbound.began_ns[message.id] = began_ns
        if message.id not in inbound.waiting:
            self.waited(inbound, message)

    def waited(self, inbound: Inbound, message: Message) -> None:
        """A request has begun. If it has ended in the same moment, nobody else will say so."""
        if message.id in inbound.running:
            return
        began_ns = inbound.began_ns.pop(message.id, 0)
        if began_ns:
            function = None if int(message.type) in self._nameless else inbound.functions.get(message.arg)
            name = function.name if isinstance(function, Function) else type(message).__name__
            self._meter.handler_ended(inbound.caller.name, name, _now() - began_ns)

    def _ended(self, inbound: Inbound, run: Run) -> None:
        began_ns = inbound.began_ns.pop(run.id, 0)
        if began_ns:
            self._meter.handler_ended(inbound.caller.name, run.function.name, _now() - began_ns)

    def failed(self, run: Run, error: BaseException) -> None:
        """A handler, or what leads to it, has raised."""
        self._meter.handler_failed(run.inbound.caller.name, run.function.name, error)
