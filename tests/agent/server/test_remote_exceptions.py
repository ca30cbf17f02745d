"""Exceptions on their way home: what a caller sees of what a handler raised, and that nothing raised does harm."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import pytest
import torch

import arpc
from arpc.agent.server.remote_exceptions import describe_failure, rebuild_failure
from arpc.errors import (
    CallCancelledError,
    OverloadedError,
    RemoteError,
    RemoteTraceback,
    SerializationError,
    ShutdownError,
)
from arpc.ids import WorkerInfo
from arpc.testing import cluster
from arpc.wire.frames import frame
from arpc.wire.messages import FailureKind, MessageType
from arpc.wire.pickling import Pickler
from arpc.wire.policy import UNRESTRICTED
from tests.agent.leftovers import assert_both_alive
from tests.agent.stage import call_on, echo

# -- exceptions of all kinds


class DetailedError(Exception):
    """Takes two arguments and keeps more besides."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail
        self.extra: Any = None


class ForgetfulError(Exception):
    """Cannot be rebuilt: its constructor wants more than it keeps in ``args``."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{code}: {detail}")


class UnpicklableError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class StubbornError(Exception):
    """Raises when it is pickled."""

    def __reduce__(self) -> Any:
        raise LookupError("not to be pickled")


class ViolentError(Exception):
    """Ends the process, if it is let, when it is pickled."""

    def __reduce__(self) -> Any:
        sys.exit("pickled")


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise LookupError("not to be described")

    __repr__ = __str__


class TrapError(Exception):
    """Ends the process, if it is let, when it is rebuilt."""

    def __reduce__(self) -> Any:
        return sys.exit, ("rebuilt",)


class NotAnError(Exception):
    """Is rebuilt as something that cannot be raised."""

    def __reduce__(self) -> Any:
        return str, ("just text",)


class BasicError(BaseException):
    """Not an Exception, so that hardly anybody catches it."""


class WithTensorError(Exception):
    pass


async def throw(error: type[BaseException], *args: Any) -> None:
    raise error(*args)


async def throw_later(error: type[BaseException], *args: Any) -> None:
    await asyncio.sleep(0)
    raise error(*args)


def throw_in_thread(error: type[BaseException], *args: Any) -> None:
    raise error(*args)


@arpc.inline
def throw_inline(error: type[BaseException], *args: Any) -> None:
    raise error(*args)


async def throw_from_async_generator(error: type[BaseException], *args: Any):
    raise error(*args)
    yield


def throw_from_generator(error: type[BaseException], *args: Any):
    raise error(*args)
    yield


EVERY_WAY = [throw, throw_later, throw_in_thread, throw_inline, throw_from_async_generator, throw_from_generator]


async def failure_of(group: Any, function: Any, *args: Any) -> BaseException:
    """What a caller sees of a call that fails, or of a stream that does."""
    try:
        if function in {throw_from_async_generator, throw_from_generator}:
            items = [item async for item in group[0].stream("worker1", function, args=args)]
            pytest.fail(f"it gave {items}")
        result = await group[0].rpc_sync("worker1", function, args=args)
    except BaseException as error:  # noqa: BLE001 - it is what is asked for
        return error
    pytest.fail(f"it returned {result}")


# -- what arrives


@pytest.mark.parametrize("function", EVERY_WAY)
async def test_an_exception_arrives_with_its_type_and_arguments(pair, function):
    error = await failure_of(pair, function, DetailedError, 7, "why")
    assert type(error) is DetailedError
    assert error.args == (7, "why")
    assert (error.code, error.detail) == (7, "why")


@pytest.mark.parametrize("function", EVERY_WAY)
async def test_its_cause_tells_where_it_was_raised(pair, function):
    error = await failure_of(pair, function, LookupError, "why")
    cause = error.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert cause.worker == "worker1"
    assert __file__ in cause.stack
    assert f"in {function.__name__}" in cause.stack
    assert "LookupError: why" in cause.stack
    assert "worker1" in str(cause)
    assert "LookupError: why" in str(cause)
    assert "arpc/agent/" not in cause.stack, "the frames of the runtime explain nothing"


async def test_attributes_and_notes_arrive(pair):
    with pytest.raises(DetailedError) as caught:
        await pair[0].rpc_sync("worker1", throw_with_notes)
    assert caught.value.__notes__ == ["see there", "and there"]
    assert caught.value.extra == {"a": [1]}
    assert "and there" in caught.value.__cause__.stack


async def throw_with_notes() -> None:
    error = DetailedError(1, "noted")
    error.add_note("see there")
    error.add_note("and there")
    error.extra = {"a": [1]}
    raise error


async def test_the_cause_it_had_is_told_in_the_traceback(pair):
    with pytest.raises(LookupError) as caught:
        await pair[0].rpc_sync("worker1", throw_with_a_cause)
    stack = caught.value.__cause__.stack
    assert "ZeroDivisionError" in stack
    assert "direct cause" in stack


async def throw_with_a_cause() -> None:
    try:
        1 / 0  # noqa: B018 - for its error
    except ZeroDivisionError as error:
        raise LookupError("outer") from error


async def test_an_exception_group_arrives_as_one(pair):
    with pytest.raises(ExceptionGroup) as caught:
        await pair[0].rpc_sync("worker1", throw_a_group)
    assert caught.group_contains(LookupError, match="one")
    assert caught.group_contains(DetailedError)
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    handled = []
    try:
        await pair[0].rpc_sync("worker1", throw_a_group)
    except* LookupError as group:
        handled += group.exceptions
    except* DetailedError as group:
        handled += group.exceptions
    assert len(handled) == 2


async def throw_a_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(throw(LookupError, "one"))
        group.create_task(throw(DetailedError, 2, "two"))


async def test_a_tensor_in_an_exception_arrives(pair):
    error = await failure_of(pair, throw, WithTensorError, torch.arange(3), torch.ones(10_000))
    assert isinstance(error, WithTensorError)
    assert error.args[0].tolist() == [0, 1, 2]
    assert error.args[1].sum() == 10_000


async def test_through_three_workers_every_stack_is_told(trio):
    with pytest.raises(LookupError, match="deep") as caught:
        await trio[0].rpc_sync("worker1", call_on, args=("worker2", throw, LookupError, "deep"))
    cause = caught.value.__cause__
    assert cause.worker == "worker1"
    assert "raised on worker 'worker2'" in cause.stack
    assert "in call_on" in cause.stack
    assert "in throw" in cause.stack


async def test_an_error_of_arpc_in_a_handler_keeps_its_type(pair):
    with pytest.raises(arpc.UnknownWorkerError, match="nobody"):
        await pair[0].rpc_sync("worker1", call_on, args=("nobody", echo))


async def test_an_exception_is_raised_anew_for_each_call(pair):
    errors = [await failure_of(pair, throw, LookupError, "again") for _ in range(2)]
    assert errors[0] is not errors[1]


# -- what cannot arrive as it is


@pytest.mark.parametrize(
    ("kind", "args", "text"),
    [
        (ForgetfulError, (1, "two"), "1: two"),
        (UnpicklableError, ("locked",), "locked"),
        (StubbornError, ("stubborn",), "stubborn"),
        (ViolentError, ("violent",), "violent"),
        (TrapError, ("trap",), "trap"),
        (NotAnError, ("odd",), "odd"),
        (BasicError, ("basic",), "basic"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_what_cannot_be_rebuilt_is_described(pair, kind, args, text):
    for function in EVERY_WAY:
        error = await failure_of(pair, function, kind, *args)
        assert type(error) is RemoteError
        assert error.type_name == f"{__name__}.{kind.__qualname__}"
        assert error.message == text
        assert error.worker == "worker1"
        assert f"in {function.__name__}" in error.stack
        assert kind.__name__ in str(error)
        assert text in str(error)
        assert isinstance(error.__cause__, RemoteTraceback)
    await assert_both_alive(pair)


async def test_one_that_can_be_rebuilt_but_not_described(pair):
    for function in EVERY_WAY:
        error = await failure_of(pair, function, SpeechlessError)
        assert type(error) is SpeechlessError
        assert "unprintable" in error.__cause__.stack or "SpeechlessError" in error.__cause__.stack
    await assert_both_alive(pair)


@pytest.mark.parametrize(
    "kind", [SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration, StopAsyncIteration, asyncio.CancelledError]
)
async def test_what_would_stop_a_loop_or_a_coroutine_stops_neither_side(pair, kind):
    for function in EVERY_WAY:
        error = await failure_of(pair, function, kind, "stop")
        assert isinstance(error, Exception)
        assert not isinstance(error, StopIteration | StopAsyncIteration)
        if kind is asyncio.CancelledError:
            assert isinstance(error, CallCancelledError)
        else:
            # what Python itself makes of it in a coroutine or generator is told as it is
            assert kind.__name__ in f"{error}{error.__cause__}"
    await assert_both_alive(pair)


async def test_a_handler_that_ends_its_process_by_mistake_only_fails(pair):
    for function in (leave, leave_in_thread):
        with pytest.raises(RemoteError, match="SystemExit"):
            await pair[0].rpc_sync("worker1", function)
    await assert_both_alive(pair)


async def leave() -> None:
    sys.exit(3)


def leave_in_thread() -> None:
    sys.exit(3)


async def throw_long(size: int) -> None:
    raise LookupError("x" * size)


async def test_an_exception_with_a_very_long_message_arrives(pair):
    error = await failure_of(pair, throw_long, 50_000_000)
    assert type(error) is LookupError
    assert len(error.args[0]) == 50_000_000
    assert len(error.__cause__.stack) < 100_000
    await assert_both_alive(pair)


async def test_an_exception_that_is_larger_than_a_message_is_described():
    options = arpc.RpcOptions(gc_freeze=False, max_body_bytes=1 << 20)
    async with cluster(2, options=options) as group:
        error = await failure_of(group, throw_long, 3_000_000)
        assert type(error) is RemoteError
        assert error.type_name == "LookupError"
        assert error.message.startswith("xxx")
        await assert_both_alive(group)


# -- the payload


@pytest.mark.parametrize(
    ("kind", "expected", "text"),
    [
        (FailureKind.TIMEOUT, arpc.RpcTimeoutError, "fn on worker 'w' ran past its deadline"),
        (FailureKind.CANCELLED, CallCancelledError, "fn was cancelled on worker 'w'"),
        (FailureKind.OVERLOADED, OverloadedError, "worker 'w' refused fn: full"),
        (FailureKind.SHUTDOWN, ShutdownError, "worker 'w' is shutting down and did not run fn"),
        (FailureKind.RAISED, LookupError, "full"),
    ],
)
def test_the_kind_of_a_failure_decides_its_exception(kind, expected, text):
    payload, slots = describe_failure(LookupError("full"), Pickler(), main_by_value=False)
    error = rebuild_failure(kind, payload, slots, WorkerInfo("w", 0), "fn", UNRESTRICTED)
    assert type(error) is expected
    assert text in str(error)


def test_an_exception_never_raised_can_be_described_too():
    payload, slots = describe_failure(LookupError("never raised"), Pickler(), main_by_value=False)
    error = rebuild_failure(FailureKind.RAISED, payload, slots, WorkerInfo("w", 0), "fn", UNRESTRICTED)
    assert error.__cause__.stack.strip() == "LookupError: never raised"


async def test_a_malformed_failure_ends_its_call_and_the_connection(pair, caplog):
    """What does not decode closes the connection, and no call on it is forgotten."""
    agent = pair[0].agent
    future = pair[0].rpc_async("worker1", hang)
    (call_id,) = [call_id for call_id, _ in agent.peer("worker1").calls]
    connection = pair[1].agent.peer("worker0").connection
    connection.send(frame(MessageType.FAILURE, 0, call_id, 0, 0, b"no pickle"))
    with pytest.raises(SerializationError, match="failure of hang is malformed"):
        await future
    await asyncio.wait_for(connection.wait_closed(), 30)
    assert any("malformed failure" in record.message for record in caplog.records)
    await assert_both_alive(pair)


async def hang() -> None:
    await asyncio.Event().wait()
