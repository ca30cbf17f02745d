"""`Sender`, built alone: what it makes of a call, and what it refuses before anything is sent."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator
from types import FunctionType
from typing import Any

import pytest
import torch

from arpc.agent.client.deadlines import NEVER, Deadlines, Timeouts
from arpc.agent.client.future import Future
from arpc.agent.client.pending_calls import SEQUENCE_BITS, Call, PendingCalls
from arpc.agent.client.sender import Prepared, Sender, as_arguments, as_keywords
from arpc.agent.codec import Codec
from arpc.agent.hooks.interceptor import Interceptor
from arpc.agent.scope import WorkerScope, current_scope
from arpc.errors import RpcTimeoutError, SerializationError, ShutdownError
from arpc.ids import WorkerInfo
from arpc.wire.messages import MessageType, RequestFlag
from arpc.wire.metadata import decode_metadata
from arpc.wire.values.content import Content
from tests.agent.stage import echo

FEATURE = int(MessageType.INSPECT)


class Recipient:
    """Is told how a call has ended."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def done(self) -> bool:
        return self.error is not None

    def set_exception(self, error: Exception) -> None:
        self.error = error


class FakePeer:
    """Takes calls as a `Peer` does, and sends nothing."""

    info = WorkerInfo("peer", 1)
    main_by_value = False
    stager = None

    def __init__(self, deadlines: Deadlines) -> None:
        self.calls = PendingCalls(deadlines, lambda *_: None)
        self.function_ids: dict[Any, int] = {echo: 5}
        self.submitted: list[int] = []
        self.held: list[int] = []

    def define(self, function: Any) -> int:
        return 6 if isinstance(function, FunctionType) and "<locals>" not in function.__qualname__ else 0

    def submit(self, call_id: int, call: Call, content: Content) -> None:
        call.content = content
        self.submitted.append(call_id)

    def hold(self, call_id: int, call: Call, content: Content) -> None:
        call.content = content
        self.held.append(call_id)


class Tracer(Interceptor):
    """An interceptor that adds bytes and notes what it sees."""

    key = "trace"

    def __init__(self) -> None:
        self.occasions: list[str] = []
        self.seen: list[tuple[Any, bool]] = []
        self.adds: bytes | None = b"traced"

    def request_sent(self, peer: WorkerInfo, function: Any, slots: list[Any], is_stream: bool = False) -> bytes | None:
        self.seen.append((function, is_stream))
        slots[:] = [2 * slot for slot in slots]
        return self.adds


class HandlerScope:
    """The scope of a handler with a deadline, which notes the calls that it makes."""

    def __init__(self, deadline: float | None) -> None:
        self.deadline = deadline
        self.calls: list[Any] = []

    def call_begun(self, recipient: Any) -> None:
        self.calls.append(recipient)


class Desk:
    """A sender with fake parts around it."""

    def __init__(self, **options: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.deadlines = Deadlines(self.loop)
        self.tracer = Tracer()
        self.codec = Codec({}, (self.tracer,), 8192, max_body_bytes=1 << 16)  # type: ignore[arg-type]
        self.sender = Sender(
            name="me",
            loop=self.loop,
            codec=self.codec,
            timeouts=Timeouts(self.deadlines, 60, are_sent=True),
            **options,
        )
        self.peer = FakePeer(self.deadlines)

    def send(self, function: Any, *args: Any, **fields: Any) -> Call:
        """Send a call, and return what waits for its reply."""
        recipient = fields.pop("recipient", None) or Recipient()
        call_id = self.sender.send(Call(self.peer, recipient, function, args, **fields))
        call = self.peer.calls.get(call_id)
        assert call is not None
        return call


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    made = Desk()
    yield made
    made.deadlines.close()


# -- what is sent


async def test_a_call_without_arguments_has_an_empty_body(desk):
    call = desk.send(echo)
    assert (call.type, call.flags, call.function_id, call.timeout_ms) == (MessageType.REQUEST, 0, 5, 60_000)
    assert (call.content.pickle, call.content.meta, call.content.schema) == (b"", b"", None)
    assert call.size_bytes == call.content.size_bytes()
    assert call.connection is None
    assert call.name == "echo"
    ((call_id, pending),) = desk.peer.calls
    assert pending is call
    assert desk.peer.submitted == [call_id]


async def test_arguments_are_pickled_and_tensors_packed(desk):
    call = desk.send(echo, 1, "two", torch.ones(3))
    assert call.flags == 0
    assert call.content.schema.inline_bytes >= 12
    assert pickle.loads(desk.send(echo, 1, "two").content.pickle) == (1, "two")


async def test_arguments_by_name_are_said_by_a_flag(desk):
    call = desk.send(echo, 1, kwargs={"two": 2})
    assert call.flags == RequestFlag.KWARGS
    assert pickle.loads(call.content.pickle) == ((1,), {"two": 2})
    assert desk.send(echo, 1, kwargs={}).flags == 0


async def test_a_function_that_the_peer_does_not_know_is_defined(desk):
    assert desk.send(decode_metadata).function_id == 6


async def test_a_function_without_a_name_travels_with_its_arguments(desk):
    call = desk.send(lambda value: value, 1)
    assert call.function_id == 0
    function, args = pickle.loads(call.content.pickle)
    assert (function(2), args) == (2, (1,))


async def test_the_message_of_a_feature_names_no_function(desk):
    call = desk.send(Recipient, "question", type=FEATURE, function_id=1)
    assert (call.type, call.function_id) == (FEATURE, 1)
    assert pickle.loads(call.content.pickle) == ("question",)


async def test_a_preparation_says_what_is_sent_in_the_place_of_something():
    class Script:
        def __call__(self) -> None: ...

    def prepare(function: Any, args: Any, kwargs: Any) -> Any:
        return decode_metadata, (*args, kwargs)

    desk = Desk(preparations={Script: prepare})
    call = desk.send(Script(), 1, kwargs={"a": 2}, recipient=Future(loop=desk.loop))
    assert call.flags == 0
    function, args = pickle.loads(call.content.pickle)
    assert (function, args) == (decode_metadata, (1, {"a": 2}))


async def test_a_call_may_be_held(desk):
    desk.send(echo, is_held=True)
    assert len(desk.peer.held) == 1
    assert desk.peer.submitted == []


async def test_a_call_without_a_deadline(desk):
    desk.send(echo, timeout=0)
    ((call_id, call),) = desk.peer.calls
    assert call_id >> SEQUENCE_BITS == NEVER
    assert call.timeout_ms == 0


# -- metadata and interceptors


async def test_metadata_of_the_call_travels_in_any_case(desk):
    assert decode_metadata(desk.send(echo, metadata={"own": b"1"}).content.meta) == {"own": b"1"}


async def test_interceptors_with_an_occasion_add_their_bytes_and_may_change_tensors(desk):
    desk.tracer.occasions.append("now")
    call = desk.send(echo, torch.ones(2), metadata={"own": b"1"}, flags=RequestFlag.STREAM)
    assert decode_metadata(call.content.meta) == {"own": b"1", "trace": b"traced"}
    assert desk.tracer.seen == [(echo, True)]
    assert torch.frombuffer(bytearray(b"".join(call.content.inline)), dtype=torch.float32, count=2).tolist() == [2, 2]
    desk.tracer.adds = None
    assert desk.send(echo).content.meta == b""
    desk.tracer.occasions.clear()
    desk.send(echo)
    assert len(desk.tracer.seen) == 2


async def test_interceptors_do_not_see_what_is_made_for_no_caller(desk):
    desk.tracer.occasions.append("now")
    assert desk.send(echo, is_internal=True).content.meta == b""
    assert desk.tracer.seen == []


# -- calls of handlers


async def test_a_call_of_a_handler_ends_with_it_and_inherits_its_deadline(desk):
    scope: Any = HandlerScope(desk.loop.time() + 5)
    token = current_scope.set(scope)
    try:
        recipient = Recipient()
        call = desk.send(echo, recipient=recipient)
        assert 4900 < call.timeout_ms <= 5000
        assert scope.calls == [recipient]
        assert desk.send(echo, is_internal=True).timeout_ms == 60_000
        assert scope.calls == [recipient]
        scope.deadline = desk.loop.time() - 1
        with pytest.raises(RpcTimeoutError, match="no time is left"):
            desk.send(echo)
    finally:
        current_scope.reset(token)
    assert len(desk.peer.calls) == 2


async def test_the_scope_of_a_worker_has_no_deadline(desk):
    token = current_scope.set(WorkerScope("worker"))
    try:
        assert desk.send(echo).timeout_ms == 60_000
    finally:
        current_scope.reset(token)


# -- what is refused


def assert_nothing_sent(desk: Desk) -> None:
    assert len(desk.peer.calls) == 0
    assert not desk.peer.submitted


@pytest.mark.parametrize("args", ["text", 1, {"a": 1}, torch.ones(2)])
async def test_what_is_no_tuple_of_arguments(desk, args):
    with pytest.raises(TypeError, match=r"args must be a tuple of arguments, .*: write args="):
        desk.sender.send(Call(desk.peer, Recipient(), echo, args))
    assert_nothing_sent(desk)


@pytest.mark.parametrize("kwargs", ["text", 1, [("a", 1)], torch.ones(2)])
async def test_what_is_no_dict_of_arguments(desk, kwargs):
    with pytest.raises(TypeError, match="kwargs must be a dict"):
        desk.send(echo, kwargs=kwargs)
    assert_nothing_sent(desk)


async def test_what_is_no_function(desk):
    for function, kind in (("text", "str"), (5, "int")):
        with pytest.raises(TypeError, match=f"function should be callable, and {kind} is not"):
            desk.send(function)
    coroutine = echo()
    with pytest.raises(TypeError, match="pass the function itself, not its call"):
        desk.send(coroutine)
    coroutine.close()
    assert_nothing_sent(desk)


async def test_an_argument_that_cannot_be_pickled_is_named(desk):
    with pytest.raises(SerializationError, match="argument 'value' of echo") as caught:
        desk.send(echo, threading.Lock())
    assert not caught.value.may_have_run
    with pytest.raises(SerializationError, match="cannot be sent"):
        desk.send(lambda value: value, threading.Lock())
    assert_nothing_sent(desk)


async def test_more_than_a_peer_takes(desk):
    with pytest.raises(SerializationError, match=r"arguments of echo make a pickle of .* raise RpcOptions") as caught:
        desk.send(echo, bytes(1 << 16))
    assert not caught.value.may_have_run
    assert_nothing_sent(desk)


async def test_an_interceptor_that_raises(desk):
    desk.tracer.occasions.append("now")
    desk.tracer.request_sent = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        desk.send(echo)
    assert_nothing_sent(desk)


async def test_a_sender_that_is_closed(desk):
    desk.sender.close()
    assert desk.sender.is_closed
    with pytest.raises(ShutdownError, match="'me' is shutting down") as caught:
        desk.send(echo)
    assert not caught.value.may_have_run
    assert_nothing_sent(desk)


async def test_another_thread(desk):
    with pytest.raises(RuntimeError, match=r"echo was called from a thread .*: use rpc_async"):
        await asyncio.to_thread(desk.send, echo)
    assert_nothing_sent(desk)


# -- arguments that are prepared


async def test_prepared_arguments_are_sent_as_they_are(desk):
    prepared = desk.sender.prepare(lambda work: work(), desk.peer, echo, (1, 2), {"a": 3})
    assert isinstance(prepared, Prepared)
    call_id = desk.sender.send(Call(desk.peer, Recipient(), prepared.function, prepared, prepared.kwargs))
    call = desk.peer.calls.get(call_id)
    assert call.content.pickle == prepared.pickle
    assert call.flags == RequestFlag.KWARGS
    assert desk.sender.prepare(lambda work: work(), desk.peer, echo, None, None) == ()


async def test_what_was_prepared_for_another_start_of_the_peer_is_pickled_again(desk):
    prepared = desk.sender.prepare(lambda work: work(), desk.peer, echo, (1, 2), None)
    del desk.peer.function_ids[echo]
    desk.peer.define = lambda _: 0
    call_id = desk.sender.send(Call(desk.peer, Recipient(), echo, prepared))
    assert pickle.loads(desk.peer.calls.get(call_id).content.pickle) == (echo, (1, 2))


@pytest.mark.parametrize(("args", "expected"), [((1,), (1,)), ([1, 2], (1, 2)), (None, ()), ((), ())])
def test_positional_arguments_are_a_tuple(args, expected):
    assert as_arguments(args) == expected


def test_arguments_by_name_are_a_dict():
    assert as_keywords({"a": 1}) == {"a": 1}
    with pytest.raises(TypeError, match="kwargs must be a dict"):
        as_keywords([("a", 1)])  # type: ignore[arg-type]
