"""`Replies`, built alone: whatever becomes of a request, it is answered once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from arpc.agent.client.deadlines import Deadlines
from arpc.agent.codec import Codec
from arpc.agent.hooks.observers import Observers
from arpc.agent.server.functions import Function
from arpc.agent.server.inbound import Inbound
from arpc.agent.server.replies import Replies
from arpc.agent.server.run import NO_CONTEXT, Run
from arpc.errors import ConnectionClosedError, OverloadedError, ProtocolError
from arpc.ids import WorkerInfo
from arpc.wire.frames import HEADER
from arpc.wire.messages import FailureKind, ItemFlag, MessageType
from arpc.wire.values.content import Content
from arpc.wire.values.pickler import loads
from tests.agent.stage import echo

CALLER = WorkerInfo("caller", 1)


class FakeConnection:
    """Notes what is sent, without the content of tensors: type, flags, id, number and pickle."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.sent: list[tuple[int, int, int, int, bytes]] = []
        self.is_closed = False
        self.dropped: list[Any] = []

    def send_message(self, type_: int, flags: int, id_: int, arg: int, timeout_ms: int, content: Content) -> Any:
        if self.is_closed:
            raise ConnectionClosedError("on purpose")
        self.sent.append((type_, flags, id_, arg, content.pickle))
        return SimpleNamespace(is_sent=False) if content.buffers else None

    def send(self, data: bytes) -> None:
        if self.is_closed:
            raise ConnectionClosedError("on purpose")
        _, type_, flags, _, id_, arg, *_ = HEADER.unpack_from(data)
        self.sent.append((type_, flags, id_, arg, data[HEADER.size :]))

    def drop_bulk(self, bulk: Any) -> None:
        self.dropped.append(bulk)


class Meter:
    """Notes how handlers end."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def handler_ended(self, caller: str, function: str, duration_ns: int) -> None:
        assert duration_ns >= 0
        self.log.append(f"{function} of {caller} ended")

    def handler_failed(self, caller: str, function: str, error: BaseException) -> None:
        self.log.append(f"{function} of {caller} failed")


class Desk:
    """Replies with a fake connection."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        connection: Any = FakeConnection()
        self.connection = connection
        self.readmitted: list[Inbound] = []
        self.codec = Codec({}, (), 8192, max_body_bytes=1 << 20)
        self.loop = loop
        self.observers = Observers()
        self.is_closed = False
        self.readmit = self.readmitted.append
        host: Any = self
        self.replies = Replies(host)
        self.inbound = Inbound(connection, CALLER, Deadlines(loop), max_handlers=10, main_by_value=False)

    def run(self, id_: int = 7, function: Any = echo) -> Run:
        """A request that is being handled."""
        host: Any = self
        run = Run(host, self.inbound, Function(function), id_, 0, copy_context())
        self.inbound.register(run)
        return run

    def answer(self) -> Any:
        """What the caller is told, which must be one message."""
        ((type_, flags, id_, arg, pickle),) = self.connection.sent
        assert id_ == 7
        if type_ == MessageType.REPLY:
            return loads(pickle, []) if pickle else None
        return MessageType(type_), flags, arg


@pytest.fixture
async def desk() -> Desk:
    return Desk()


# -- results


@pytest.mark.parametrize("result", [None, 1, "text", [1, {"a": 2}]])
async def test_a_result_is_the_answer(desk, result):
    run = desk.run()
    desk.replies.returned(run, result)
    assert desk.answer() == result
    assert run.ended
    assert run.context is NO_CONTEXT
    assert not desk.inbound.running
    assert (desk.replies.calls_ended, desk.replies.calls_failed) == (1, 0)


async def test_none_takes_no_pickle(desk):
    desk.replies.returned(desk.run(), None)
    assert desk.connection.sent == [(MessageType.REPLY, 0, 7, 0, b"")]


async def test_content_that_is_encoded_is_sent_as_it_is(desk):
    desk.replies.end(desk.run(), Content(b"encoded"))
    assert [pickle for *_, pickle in desk.connection.sent] == [b"encoded"]


async def test_a_result_that_cannot_be_pickled_is_a_failure(desk):
    desk.replies.returned(desk.run(), asyncio.get_running_loop())
    assert desk.answer() == (MessageType.FAILURE, FailureKind.RAISED, 0)
    assert b"the result of echo" in desk.connection.sent[0][4]


async def test_a_result_that_is_too_large_is_a_failure(desk):
    desk.replies.returned(desk.run(), bytes(1 << 20))
    assert desk.answer() == (MessageType.FAILURE, FailureKind.RAISED, 0)
    assert b"makes a pickle of" in desk.connection.sent[0][4]


async def test_a_large_reply_that_nobody_wants_any_more_is_dropped(desk):
    desk.replies.returned(desk.run(), torch.ones(10_000))
    desk.inbound.cancel(7)
    assert len(desk.connection.dropped) == 1
    desk.inbound.cancel(7)
    assert len(desk.connection.dropped) == 1


# -- errors


@pytest.mark.parametrize(
    ("error", "is_expired", "is_closed", "kind"),
    [
        (ValueError("on purpose"), False, False, FailureKind.RAISED),
        (SystemExit(1), False, False, FailureKind.RAISED),
        (asyncio.CancelledError(), False, False, FailureKind.CANCELLED),
        (asyncio.CancelledError(), True, False, FailureKind.TIMEOUT),
        (asyncio.CancelledError(), False, True, FailureKind.LEFT),
        (asyncio.CancelledError(), True, True, FailureKind.TIMEOUT),
    ],
)
async def test_an_error_is_the_answer(desk, error, is_expired, is_closed, kind):
    run = desk.run()
    run.expired = is_expired
    desk.is_closed = is_closed
    desk.replies.raised(run, error)
    assert desk.answer() == (MessageType.FAILURE, kind, 0)
    assert (desk.replies.calls_ended, desk.replies.calls_failed) == (1, 1)
    assert not desk.inbound.running


async def test_a_request_whose_function_was_not_called_is_refused(desk):
    run = desk.run()
    run.is_refused = True
    desk.replies.raised(run, ValueError("on purpose"))
    assert desk.answer() == (MessageType.FAILURE, FailureKind.REFUSED, 0)


async def test_a_malformed_request_is_logged(desk, caplog):
    desk.replies.raised(desk.run(), ProtocolError("on purpose"))
    assert "a malformed request of worker caller: on purpose" in caplog.text


async def test_a_request_without_a_run_is_answered_too(desk):
    desk.replies.fail(desk.inbound, 7, FailureKind.OVERLOADED, OverloadedError("too many"))
    assert desk.answer() == (MessageType.FAILURE, FailureKind.OVERLOADED, 0)


async def test_a_cancelled_request_cancels_the_calls_it_made(desk):
    run = desk.run()
    nested = asyncio.get_running_loop().create_future()
    run.call_begun(nested)
    desk.replies.raised(run, asyncio.CancelledError())
    assert nested.cancelled()


async def test_other_ends_leave_the_calls_it_made_alone(desk):
    for number, end in enumerate(
        (lambda run: desk.replies.returned(run, 1), lambda run: desk.replies.raised(run, ValueError()))
    ):
        run = desk.run(number)
        nested = asyncio.get_running_loop().create_future()
        run.call_begun(nested)
        end(run)
        assert not nested.done()
        assert run.nested is None, "their errors would keep the frames of the handler"


# -- once

ENDS: dict[str, Callable[[Replies, Run], None]] = {
    "returned": lambda replies, run: replies.returned(run, 1),
    "encoded": lambda replies, run: replies.end(run, Content(b"")),
    "stream ended": lambda replies, run: replies.stream_ended(run),
    "raised": lambda replies, run: replies.raised(run, ValueError("on purpose")),
    "cancelled": lambda replies, run: replies.raised(run, asyncio.CancelledError()),
}


@pytest.mark.parametrize(("first", "second"), [*product(ENDS, ENDS)])
async def test_a_request_ends_once(desk, first, second):
    run = desk.run()
    meter: Any = Meter()
    desk.replies.meter = meter
    run.arrived_ns = 1
    ENDS[first](desk.replies, run)
    sent, failed = list(desk.connection.sent), desk.replies.calls_failed
    ENDS[second](desk.replies, run)
    assert desk.connection.sent == sent
    assert len(sent) == 1
    assert (desk.replies.calls_ended, desk.replies.calls_failed) == (1, failed)
    assert meter.log.count("echo of caller ended") == 1


async def test_an_answer_that_finds_no_connection_is_the_end_too(desk):
    desk.connection.is_closed = True
    for number, end in enumerate(ENDS.values()):
        run = desk.run(number)
        end(desk.replies, run)
        assert run.ended
    desk.replies.fail(desk.inbound, 99, FailureKind.OVERLOADED, OverloadedError("too many"))
    assert not desk.inbound.running
    assert desk.replies.calls_ended == len(ENDS)


# -- those who hear of it


async def test_requests_that_wait_may_run_when_another_has_ended(desk):
    run = desk.run()
    desk.inbound.waiting[8] = None
    desk.replies.returned(run, 1)
    await asyncio.sleep(0)
    assert desk.readmitted == [desk.inbound]


async def test_a_meter_hears_of_ends_and_of_failures(desk):
    meter: Any = Meter()
    desk.replies.meter = meter
    told: list[tuple[str, str]] = []
    desk.replies.on_failure = lambda name, error: told.append((name, str(error)))
    runs = [desk.run(1), desk.run(2)]
    for run in runs:
        run.arrived_ns = 1
    desk.replies.returned(runs[0], None)
    desk.replies.raised(runs[1], ValueError("on purpose"))
    assert meter.log == ["echo of caller ended", "echo of caller failed", "echo of caller ended"]
    assert told == [("echo", "on purpose")]


# -- streams


async def test_items_are_numbered_and_the_end_says_how_many_there_were(desk):
    run = desk.run()
    for item in (10, None, 30):
        assert desk.replies.send_item(run, item) > 0
    desk.replies.stream_ended(run)
    assert [(type_, flags, arg) for type_, flags, _, arg, _ in desk.connection.sent] == [
        (MessageType.ITEM, 0, 0),
        (MessageType.ITEM, 0, 1),
        (MessageType.ITEM, 0, 2),
        (MessageType.ITEM, ItemFlag.LAST, 3),
    ]


async def test_the_error_of_a_stream_says_how_many_items_came_before(desk):
    run = desk.run()
    desk.replies.send_item(run, 10)
    desk.replies.raised(run, ValueError("on purpose"))
    assert desk.connection.sent[-1][:4] == (MessageType.FAILURE, FailureKind.RAISED, 7, 1)
