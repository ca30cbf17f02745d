"""What an agent sends with a call: arguments pickled for one peer, and what rides along."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence, Sized
from typing import Any, NamedTuple

from arpc.agent.codec import Codec, Interceptor
from arpc.agent.functions import Preparation, name_of
from arpc.agent.future import Future
from arpc.agent.observers import Observers
from arpc.agent.peers import Peer, unsendable
from arpc.errors import SerializationError, not_run
from arpc.ids import WorkerInfo
from arpc.wire.messages import (
    WINDOW,
)
from arpc.wire.pickling import Pickler
from arpc.wire.tensors import Slot

__all__ = ["ArgumentPacking", "Prepared", "as_arguments", "as_keywords"]


class Prepared(NamedTuple):
    """The arguments of a call that have been pickled for one peer, see `Agent.prepare`."""

    payload: bytes
    slots: list[Slot]
    is_named: bool
    """The function goes by its number, and not with the arguments."""
    function: Any
    """What is called: not the function that was given, if that is no function of Python's own."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] | None


class ArgumentPacking:
    """The part of an agent that packs arguments; the rest is in the class that inherits."""

    info: WorkerInfo
    codec: Codec
    observers: Observers
    _interceptors: Sequence[Interceptor]
    _max_payload_bytes: int
    _occasions: tuple[Sized, ...]
    """Of the interceptors in their order, and of others after them."""
    _pickler: Pickler
    _preparations: Mapping[type, Preparation]

    @staticmethod
    def _prepared(
        prepare: Preparation,
        function: Any,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        future: asyncio.Future[Any],
    ) -> tuple[Any, tuple[Any, ...]]:
        function, arguments = prepare(function, as_arguments(args), kwargs)
        if isinstance(future, Future):
            future.script_type = getattr(function, "returns", None)
        return function, arguments

    def _pickle(
        self,
        peer: Peer,
        function: Any,
        function_id: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
    ) -> tuple[bytes, list[Slot]]:
        if function_id == 0:
            payload, slots = self._pickle_with_function(peer, function, args, kwargs)
        else:
            payload, slots = self._pickler.dumps_call(
                function, args, as_keywords(kwargs) if kwargs else None, main_by_value=peer.main_by_value, to=peer.info
            )
        if len(payload) > self._max_payload_bytes:
            raise self._too_large(function, payload)
        return payload, slots

    def _pickle_other(
        self, peer: Peer, function: Any, function_id: int, args: Any, kwargs: Mapping[str, Any] | None
    ) -> tuple[bytes, list[Slot]]:
        """The same for arguments that are no tuple: a list, nothing, or what has been pickled already."""
        if args.__class__ is not Prepared:
            return self._pickle(peer, function, function_id, as_arguments(args), kwargs)
        if bool(function_id) is not args.is_named:
            # since then the peer has come back as another, to which functions travel in another way
            return self._pickle(peer, function, function_id, args.args, kwargs)
        return args.payload, args.slots

    def _too_large(self, function: Any, payload: bytes) -> SerializationError:
        text = (
            f"the arguments of {name_of(function)} make a pickle of {len(payload)} bytes, and at most "
            f"{self._max_payload_bytes} are taken: pass large data as tensors, or raise RpcOptions.max_body_bytes"
        )
        return not_run(SerializationError(text))

    def _meta(self, peer: Peer, function: Any, slots: list[Slot], window: int) -> dict[str, Any]:
        """What rides on a call."""
        meta: dict[str, Any] = {WINDOW: window} if window else {}
        observers = self.observers
        for interceptor, occasions in zip(self._interceptors, self._occasions, strict=False):
            if occasions or interceptor is observers:  # some of whom stand by
                added = interceptor.request_sent(peer.info, function, slots, window > 0)
                if added is not None:
                    meta[interceptor.key] = added
        return meta

    def _pickle_with_function(
        self, peer: Peer, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
    ) -> tuple[bytes, list[Slot]]:
        if not callable(function):
            hint = ": pass the function itself, not its call" if asyncio.iscoroutine(function) else ""
            raise TypeError(f"function should be callable, and {type(function).__qualname__} is not{hint}")
        by_value = peer.main_by_value
        payload = (args, as_keywords(kwargs)) if kwargs else args
        try:
            return self._pickler.dumps((function, payload), main_by_value=by_value, to=peer.info)
        except Exception as error:
            # say which part of it was at fault
            self._pickler.dumps_call(
                function, args, as_keywords(kwargs) if kwargs else None, main_by_value=by_value, to=peer.info
            )
            raise unsendable(function, error) from error


def as_arguments(args: Any) -> tuple[Any, ...]:
    """The positional arguments as a tuple. What is no list of arguments is refused: it would be taken apart."""
    if args is None:
        return ()
    if isinstance(args, tuple | list):
        return tuple(args)
    raise TypeError(f"args must be a tuple of arguments, not {type(args).__qualname__}: write args=(value,)")


def as_keywords(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name as they are sent."""
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a dict of arguments by name, not {type(kwargs).__qualname__}")
    return dict(kwargs)
