"""Blocking calls: packed in the calling thread, sent and completed on the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch

from arpc import torchstate
from arpc.agent.client.pending_calls import Call
from arpc.agent.client.sender import Prepared
from arpc.agent.peers.peer import Peer
from arpc.compat.blocking_client.calls import TAKES_LOOP
from arpc.compat.drop_in import DropIn
from arpc.compat.failures import as_torch_error, packing_error
from arpc.compat.loop_thread import Outcome, refuse_loop_thread
from arpc.options import UNSET, Unset

__all__ = ["arpc_timeout", "call", "call_async", "torch_future_of"]

_UNSET_S: Final = -1.0
_is_pristine = torchstate.is_pristine


def arpc_timeout(timeout: float) -> float | Unset:
    """Convert a timeout of torch, where -1 means that it is not set."""
    return UNSET if timeout == _UNSET_S else timeout


def _seconds(drop_in: DropIn, timeout: float) -> float:
    return drop_in.agent.timeouts.default_s if timeout == _UNSET_S else timeout


class _Call:
    """One call in flight: begun on the loop, in the context of the thread that made it."""

    __slots__ = (
        "_call_id",
        "_drop_in",
        "_fail",
        "_function",
        "_is_awaited",
        "_kwargs",
        "_name",
        "_packed",
        "_peer",
        "_succeed",
        "_timeout",
        "anchor",
    )

    def __init__(
        self,
        drop_in: DropIn,
        peer: Peer,
        function: Callable[..., Any],
        packed: Prepared | tuple[()],
        timeout: float,
        name: str,
        *,
        is_awaited: bool,
    ) -> None:
        self._drop_in = drop_in
        self._is_awaited = is_awaited
        self._peer = peer
        self._packed = packed
        self._function = packed.function if packed else function
        self._kwargs = packed.kwargs if packed else None
        self._timeout = arpc_timeout(timeout)
        self._name = name
        self._call_id = 0
        self.anchor: object = None

    def start(self, succeed: Callable[[Any], None], fail: Callable[[BaseException], None]) -> None:
        """Begin the call soon. In the end ``succeed`` or ``fail`` is called, on the loop."""
        self._succeed = succeed
        self._fail = fail
        drop_in = self._drop_in
        context = drop_in.thread.caller_context()
        drop_in.agent.observers.thread_calls(context, self._peer.info.name, self._name or self._function)
        if _is_pristine():
            drop_in.thread.submit(context, self._begin)
        else:
            # features that look at the arguments need to know whether the thread wants gradients
            drop_in.thread.submit(context, partial(torchstate.run_with, torchstate.capture(), self._begin))

    def _begin(self) -> None:
        agent = self._drop_in.agent
        future: asyncio.Future[Any] = agent.loop.create_future()
        call = Call(
            self._peer,
            future,
            self._function,
            self._packed,
            self._kwargs,
            self._timeout,
            is_awaited=self._is_awaited,
            called=self._name,
        )
        try:
            self._call_id = agent.sender.send(call)
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            self._fail(error)
        else:
            future.add_done_callback(self._done)

    def _done(self, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            # cancelled together with the handler that made it
            self._peer.cancel(self._call_id)
            self._fail(asyncio.CancelledError())
        elif (error := future.exception()) is not None:
            self._fail(error)
        else:
            self._succeed(future.result())


def _pack(
    drop_in: DropIn,
    peer: Peer,
    function: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
) -> Prepared | tuple[()]:
    try:
        return drop_in.agent.prepare(peer, function, args, kwargs)
    except Exception as error:
        raise packing_error(error, peer.info) from error


def call(
    drop_in: DropIn,
    peer: Peer,
    function: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float,
    name: str = "",
) -> Any:
    """Make a call and return its result. Raises torch's errors. ``name`` is `Call.called`."""
    refuse_loop_thread("await arpc.rpc_sync(...)")
    packed = _pack(drop_in, peer, function, args, kwargs)
    try:
        result = drop_in.blocking.call(peer, function, packed, arpc_timeout(timeout), name=name)
        if result is not TAKES_LOOP:
            return result
        outcome: Outcome[Any] = Outcome()
        _Call(drop_in, peer, function, packed, timeout, name, is_awaited=True).start(outcome.set, outcome.fail)
        return outcome.wait()
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - translated
        raised = as_torch_error(error, peer.info, _seconds(drop_in, timeout), function)
    raise raised


def call_async(
    drop_in: DropIn,
    peer: Peer,
    function: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float,
    *,
    anchor: object = None,
    name: str = "",
) -> torch.futures.Future[Any]:
    """Start a call. Return a torch future, which is completed in a thread where its callbacks may block.

    ``anchor`` is kept alive until the call has ended. ``name`` is `Call.called`.
    """
    packed = _pack(drop_in, peer, function, args, kwargs)
    future: torch.futures.Future[Any] = torch.futures.Future()
    completions = drop_in.completions
    timeout_s = _seconds(drop_in, timeout)

    def fail(error: BaseException) -> None:
        completions.fail(future, as_torch_error(error, peer.info, timeout_s, function))

    started = _Call(drop_in, peer, function, packed, timeout, name, is_awaited=False)
    started.anchor = anchor
    started.start(partial(completions.complete, future), fail)
    return future


def torch_future_of(
    drop_in: DropIn, future: asyncio.Future[Any], translate: Callable[[BaseException], BaseException]
) -> torch.futures.Future[Any]:
    """Return a torch future that is completed with the outcome of a future of the loop. Called on the loop."""
    made: torch.futures.Future[Any] = torch.futures.Future()

    def done(ended: asyncio.Future[Any]) -> None:
        error = asyncio.CancelledError() if ended.cancelled() else ended.exception()
        if error is not None:
            drop_in.completions.fail(made, translate(error))
        else:
            drop_in.completions.complete(made, ended.result())

    future.add_done_callback(done)
    return made
