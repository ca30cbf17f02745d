"""Creations at the owner: the function that a creation names is run, and what it returns, or raises, is kept."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
from torch import Tensor

from arpc.agent.codec import Packed
from arpc.agent.executor import HasInbound
from arpc.agent.failures import raisable
from arpc.agent.functions import Function, name_of
from arpc.agent.requests import Inbound, Run
from arpc.agent.scope import current_scope
from arpc.errors import RRefCreationError, RRefError
from arpc.ids import GloballyUniqueId
from arpc.rref.calls import call_method
from arpc.rref.events import RRefId, WorkerName
from arpc.rref.labels import LABEL_BYTES, take_label, unpack_label
from arpc.rref.methods import template_of
from arpc.rref.values import NOTHING, Value
from arpc.torchjit import ScriptModule
from arpc.user_errors import fresh, is_a
from arpc.wire.frames import BRIEF_HEADER, brief_kind
from arpc.wire.handful import RESULT
from arpc.wire.messages import Message, MessageType, ReplyFlag, RequestFlag, RRefCreate
from arpc.wire.pickling import SCALARS
from arpc.wire.protocol import Direct

if TYPE_CHECKING:
    from arpc.rref.service import ControlService

__all__ = ["Arrivals"]

_VALUE: Final = RequestFlag.VALUE
_SCALAR: Final = RequestFlag.SCALAR
_OF_ANY_SIZE: Final = frozenset((str, bytes))
# Of these more is not sent to who has not asked for it: it may be meant to stay where it is
_MAX_UNASKED: Final = 4096
_KINDS: Final = {flags: brief_kind(int(MessageType.RREF_CREATE), flags) for flags in (0, _VALUE, _SCALAR)}
_BRIEF_TUPLE: Final = brief_kind(int(MessageType.REPLY), ReplyFlag.TUPLE)
_pack_brief = BRIEF_HEADER.pack
_set_scope = current_scope.set
_dumps = pickle.dumps
_text = GloballyUniqueId.from_int


class Arrival(msgspec.Struct, eq=False):
    """One creation of any kind."""

    arrivals: Arrivals
    inbound: Inbound
    """And not the request: that refers to its function, which is `make`, and the cycle would keep the value."""
    rref: RRefId
    value: Value
    flags: int

    async def make(self, function: Function, /, *args: Any, **kwargs: Any) -> Packed | None:
        """Run the function, and keep what it returns, or raises. The answer says that it ended."""
        value = self.value
        value.made = value.made or function.name
        try:
            if function.is_simple:
                value.set(await function.call(*args, **kwargs))
            else:
                made_here = await self.arrivals.service.agent.executor.call(function, args, kwargs)
                # before it is there for all to see
                value.stays = is_a(made_here, ScriptModule) and getattr(function.call, "keeps_modules", False)
                value.set(made_here)
        except asyncio.CancelledError:
            value.fail(_cancelled(self.rref))
            raise
        except BaseException as error:  # noqa: BLE001 - it is for those who use the value
            self.arrivals.fail(value, error)
        finally:
            self.arrivals.ended(self.rref)
        content = value.content
        is_wanted = self.flags & _VALUE or (
            self.flags & _SCALAR
            and (kind := type(content)) in SCALARS
            and (kind not in _OF_ANY_SIZE or len(content) <= _MAX_UNASKED)
        )
        return self.arrivals.packed(self.inbound, content) if is_wanted and not value.stays else None

    def not_begun(self, error: BaseException) -> None:
        if is_a(error, asyncio.CancelledError):
            self.value.fail(_cancelled(self.rref))
        else:
            # a copy: the error itself is sent to the creator, and refers to frames that refer to the value
            self.arrivals.fail(self.value, fresh(error))
        self.arrivals.ended(self.rref)


class PlainRun(Run):
    """A creation as plain as the plainest request: of a coroutine, with nothing beside its arguments."""

    creation: tuple[Any, ...] = ()
    """Those who take it, the RRef, its value, the flags of the message, and the payload as long as that is packed.

    In one: to set a field of a Struct takes longer than to make it with one.
    """

    def first_step(self) -> Any:
        _set_scope(self)
        arrivals, rref, value, flags, payload = self.creation
        if payload:
            args = arrivals.unpack(self, payload)
            self.creation = arrivals, rref, value, flags, b""
            coroutine = self.function.call(*args)
        else:
            coroutine = self.function.call()
        self.coroutine = coroutine
        return coroutine.send(None)

    def finished(self, result: Any) -> None:
        arrivals: Arrivals
        value: Value
        arrivals, rref, value, flags, _ = self.creation
        value.set(result)
        arrivals.ended(rref)
        if self.ended:
            return
        if flags and value.content is result:
            if result is None:
                arrivals.answer(self, _pack_brief(0, _BRIEF_TUPLE, self.id, 1, 0, 0))
                return
            payload = arrivals.plain_payload(result, flags)
            if payload is not None:
                data = _pack_brief(len(payload), _BRIEF_TUPLE, self.id, 1, 0, 0) + payload
                arrivals.answer(self, data)
                return
            if flags == _VALUE and (packed := arrivals.packed(self.inbound, result)) is not None:
                self.executor.returned(self, packed)
                return
        arrivals.answer(self, _pack_brief(0, _BRIEF_TUPLE, self.id, 0, 0, 0))

    def failed(self, error: BaseException) -> None:
        arrivals: Arrivals
        value: Value
        arrivals, rref, value, _, payload = self.creation
        is_cancelled = is_a(error, asyncio.CancelledError)
        has_begun = not payload
        if is_cancelled:
            value.fail(_cancelled(rref))
        else:
            arrivals.fail(value, error if has_begun else fresh(error))
        arrivals.ended(rref)
        if is_cancelled or not has_begun:
            self.executor.raised(self, error)
        elif not self.ended:
            arrivals.answer(self, _pack_brief(0, _BRIEF_TUPLE, self.id, 0, 0, 0))


class Arrivals:
    """Takes the creations of one worker: a `executor.Wrapper`."""

    def __init__(self, service: ControlService) -> None:
        self.service = service
        self._forks = service.forks
        self._values = service.values
        self._windows = service.windows
        self._call_method = Function.of_coroutine(self._method_or_call, name_of(call_method))

    def attach(self) -> None:
        """The agent is there."""
        executor = self._executor = self.service.agent.executor
        self.answer = executor.answer
        self.unpack = executor.unpack_plain
        self._copy_context = executor.context.copy
        self._start = executor.carriers.start

    # -- any

    def admit(self, run: Run, message: Message) -> Arrival | None:
        label = take_label(message)
        caller = run.inbound.caller
        if not self.service.is_new(caller.id, label.incarnation, label.number, label.oldest):
            run.message = None
            run.function = Function.of_coroutine(partial(self._created_before, label.rref), run.function.name)
            self._start(run)
            return None
        if not self._forks.creation_arrived(label.rref, label.fork, caller):
            self._refuse(run, label.rref)
            return None
        # one that comes with its arguments has no name yet
        value = self._value(label.rref, caller.name, label.made or (run.function.name if message.arg else ""))
        return Arrival(self, run.inbound, label.rref, value, message.flags)

    def _value(self, rref: RRefId, creator: WorkerName, made: str) -> Value:
        value = self._values.get(rref)
        if value is None:
            value = self._values[rref] = Value()
        value.made = made
        value.creator = creator
        return value

    def _refuse(self, run: Run, rref: RRefId) -> None:
        creator = run.inbound.caller.name
        error = RRefError(f"the creation of RRef {_text(rref)} was given up by worker {creator!r}")
        self._executor.refused(run, error)

    async def _created_before(self, rref: RRefId) -> None:
        """Answer a message that came twice, like the first."""
        value = self._values.get(rref)
        if value is None:
            raise RRefError(f"RRef {_text(rref)} was created before, and is gone")
        with suppress(Exception):
            await value.get()

    def fail(self, value: Value, error: BaseException) -> None:
        """Keep what a function raised, for those who use its value, here or elsewhere."""
        value.fail(raisable(error, self.service.info.name))

    def ended(self, rref: RRefId) -> None:
        """The value of a creation is there, or the error in its place."""
        following = self._forks.creation_ended(rref)
        if following:
            self.service.carry_out(following)

    def packed(self, inbound: Inbound, content: Any) -> Packed | None:
        """The value for its creator, who wants it at once; None lets it ask for it, to be told what is wrong."""
        if content is NOTHING:
            return None
        try:
            return Packed(
                *self.service.agent.codec.pickler.dumps_call(
                    None, (content,), None, main_by_value=inbound.main_by_value, to=inbound.caller
                )
            )
        except BaseException:  # noqa: BLE001 - whatever a user's __reduce__ may raise
            return None

    # -- the plainest

    def direct(self, link: HasInbound, handle: Callable[[HasInbound, Message], None]) -> dict[int, Direct]:
        return {kind: partial(self._take, link, handle, flags) for flags, kind in _KINDS.items()}

    def _take(
        self,
        link: HasInbound,
        handle: Callable[[HasInbound, Message], None],
        flags: int,
        id_: int,
        arg: int,
        timeout_ms: int,
        payload: bytes | bytearray,
    ) -> None:
        """`admit`, and what the executor does then, for a coroutine. Torch's state must be pristine."""
        inbound = link.inbound
        function = inbound.coroutines.get(arg)
        if function is not None and len(payload) >= LABEL_BYTES:
            incarnation, number, oldest, rref, fork, made_bytes = unpack_label(payload)
            caller = inbound.caller
            window = self._windows.get((caller.id, incarnation))
            if window is not None and not made_bytes and window.admit(number, oldest):
                executor, context = self._executor, self._copy_context()
                if not self._forks.creation_arrived(rref, fork, caller):
                    self._refuse(Run(executor, inbound, function, id_, timeout_ms, context), rref)
                    return
                value = self._values.get(rref)
                if value is None:
                    value = self._values[rref] = Value(function.name, caller.name)
                else:
                    value.made, value.creator = function.name, caller.name
                if function.call is call_method:
                    function = self._call_method
                creation = (self, rref, value, flags, payload[LABEL_BYTES:])
                self._start(PlainRun(executor, inbound, function, id_, timeout_ms, context, creation=creation))
                return
        handle(link, RRefCreate(flags, id_, arg, timeout_ms, 0, 0, 0, bytearray(payload), ()))

    def _method_or_call(self, rref: RRefId, is_created: bool, name: str, /, *args: Any) -> Coroutine[Any, Any, Any]:
        """In the place of `call_method`: the coroutine of the method itself, if there is nothing to be waited for."""
        value = self._values.get(rref)
        if value is not None and value.content is not NOTHING:
            try:
                method = self.service.get_method(value.content, name)
                if template_of(method).is_simple:
                    coroutine: Coroutine[Any, Any, Any] = method(*args)
                    return coroutine
            except Exception:  # noqa: BLE001 - what is wrong is raised again, as an error of the call
                return call_method(rref, is_created, name, *args)
        return call_method(rref, is_created, name, *args)

    def plain_payload(self, value: Any, flags: int) -> bytes | None:
        """A value that can be sent without a look at what is in it; None for others."""
        kind = type(value)
        if kind in SCALARS:
            if kind in _OF_ANY_SIZE and flags == _SCALAR and len(value) > _MAX_UNASKED:
                return None
            return _dumps(value, protocol=5)
        return self.service.agent.codec.handful(RESULT, (value,)) if kind is Tensor and flags == _VALUE else None


def _cancelled(rref: RRefId) -> RRefCreationError:
    return RRefCreationError(f"the creation of RRef {_text(rref)} was cancelled, or ran past its deadline")
