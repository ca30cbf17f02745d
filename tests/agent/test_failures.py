"""Exceptions on their way home: what a caller sees of what a handler raised, and that nothing raised does harm."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import pytest
import torch

import arpc
from arpc.agent.failures import describe_failure, rebuild_failure
from arpc.errors import (
    CallCancelledError,
    OverloadedError,
    RemoteError,
    RemoteTraceback,
    SerializationError,
    ShutdownError,
)
from arpc.wire.frames import frame
from arpc.wire.messages import FailureKind, MessageType
from arpc.wire.pickling import Pickler
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


async def assert_both_alive(group: Any) -> None:
    for caller, callee in [(0, 1), (1, 0)]:
        for _ in range(2):
            assert await group[caller].rpc_sync(f"worker{callee}", echo, args=("alive",)) == "alive"


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


@pytest.mark.parametrize("function", EVERY_WAY)
@pytest.mark.parametrize(
    ("kind", "args", "text"),
    [
        (ForgetfulError, (1, "two"), "1: two"),
        (UnpicklableError, ("locked",), "locked"),
        (StubbornError, ("stubborn",), "stubborn"),
        (ViolentError, ("violent",), "violent"),
        (SpeechlessError, (threading.Lock,), ""),
        (TrapError, ("trap",), "trap"),
        (NotAnError, ("odd",), "odd"),
        (BasicError, ("basic",), "basic"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_what_cannot_be_rebuilt_is_described(pair, function, kind, args, text):
    error = await failure_of(pair, function, kind, *args)
    if kind is SpeechlessError:
        assert type(error) is SpeechlessError, "it can be rebuilt; only its text is not to be had"
    else:
        assert type(error) is RemoteError
        assert error.type_name == f"{__name__}.{kind.__qualname__}"
        assert error.message == text
        assert error.worker == "worker1"
        assert f"in {function.__name__}" in error.stack
        assert kind.__name__ in str(error)
        assert text in str(error)
    assert isinstance(error.__cause__, RemoteTraceback)
    await assert_both_alive(pair)


@pytest.mark.parametrize("function", EVERY_WAY)
@pytest.mark.parametrize(
    "kind", [SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration, StopAsyncIteration, asyncio.CancelledError]
)
async def test_what_would_stop_a_loop_or_a_coroutine_stops_neither_side(pair, function, kind):
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


# -- what cannot be sent at all


class Unsendable:
    def __reduce__(self) -> Any:
        raise LookupError("not to be sent")


class Violent:
    def __reduce__(self) -> Any:
        sys.exit("sent")


class Unreceivable:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return explode, ()


def explode() -> None:
    raise LookupError("not to be received")


class Trap:
    def __reduce__(self) -> Any:
        return sys.exit, ("received",)


async def give(kind: type) -> Any:
    return kind()


def give_in_thread(kind: type) -> Any:
    return kind()


@arpc.inline
def give_inline(kind: type) -> Any:
    return kind()


@pytest.mark.parametrize(
    "value", [threading.Lock(), Unsendable(), [1, {"deep": Unsendable()}]], ids=["lock", "own", "deep"]
)
async def test_an_argument_that_does_not_pickle_is_named(pair, value):
    with pytest.raises(SerializationError, match=rf"argument .*of echo \({type(value).__name__}\) cannot be sent"):
        await pair[0].rpc_sync("worker1", echo, args=(value,))
    with pytest.raises(SerializationError, match=rf"argument 'value' of echo \({type(value).__name__}\)"):
        await pair[0].rpc_sync("worker1", echo, kwargs={"value": value})
    with pytest.raises(SerializationError, match="echo"):
        pair[0].rpc_async("worker1", echo, args=(value,))
    with pytest.raises(SerializationError, match="echo"):
        pair[0].stream("worker1", echo, args=(value,))
    await assert_both_alive(pair)


async def test_a_function_that_does_not_pickle_is_named(pair):
    lock = threading.Lock()

    def closure() -> None:
        lock.acquire()

    with pytest.raises(SerializationError, match=r"the function .*closure cannot be sent"):
        await pair[0].rpc_sync("worker1", closure)
    await assert_both_alive(pair)


@pytest.mark.parametrize("function", [give, give_in_thread, give_inline])
async def test_a_result_that_does_not_pickle_is_named(pair, function):
    with pytest.raises(SerializationError, match=rf"the result of {function.__name__} \(Unsendable\).*not to be sent"):
        await pair[0].rpc_sync("worker1", function, args=(Unsendable,))
    await assert_both_alive(pair)


@pytest.mark.parametrize("function", [give, give_in_thread, give_inline])
async def test_a_result_that_exits_when_it_is_pickled(pair, function):
    with pytest.raises(RemoteError, match="SystemExit"):
        await pair[0].rpc_sync("worker1", function, args=(Violent,))
    await assert_both_alive(pair)


async def test_a_result_that_cannot_be_unpickled(pair):
    with pytest.raises(SerializationError, match=r"the result of give cannot be unpacked.*not to be received"):
        await pair[0].rpc_sync("worker1", give, args=(Unreceivable,))
    with pytest.raises(SerializationError, match=r"the result of give cannot be unpacked.*SystemExit"):
        await pair[0].rpc_sync("worker1", give, args=(Trap,))
    await assert_both_alive(pair)


@pytest.mark.parametrize("function", [echo, give_in_thread, give_inline])
async def test_an_argument_that_cannot_be_unpickled(pair, function):
    with pytest.raises(SerializationError, match=r"worker 'worker1' cannot unpack the call.*not to be received"):
        await pair[0].rpc_sync("worker1", function, args=(Unreceivable(),))
    with pytest.raises(RemoteError, match="SystemExit"):
        await pair[0].rpc_sync("worker1", function, args=(Trap(),))
    await assert_both_alive(pair)


async def test_a_function_that_is_not_on_the_callee(pair, monkeypatch):
    """Both workers are in this process: the name is taken away between sending and receiving."""
    module = type(sys)("only_at_the_caller")
    exec("async def here_only():\n    return 1", module.__dict__)  # a module that no file has
    module.here_only.__module__ = module.__name__
    define = pair[1].agent.executor.define

    def define_without_the_module(inbound: Any, message: Any) -> None:
        monkeypatch.delitem(sys.modules, module.__name__)
        define(inbound, message)

    monkeypatch.setattr(pair[1].agent.executor, "define", define_without_the_module)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    text = r"not on worker 'worker1'.*only_at_the_caller.*importable there"
    with pytest.raises(SerializationError, match=text):
        await pair[0].rpc_sync("worker1", module.here_only)
    with pytest.raises(SerializationError, match=text) as caught:
        await pair[0].rpc_sync("worker1", module.here_only)
    assert caught.value.__cause__.stack.count("Traceback") <= 2, "each failure tells its own story only"
    await assert_both_alive(pair)


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
    error = rebuild_failure(kind, payload, slots, "w", "fn")
    assert type(error) is expected
    assert text in str(error)


def test_an_exception_never_raised_can_be_described_too():
    payload, slots = describe_failure(LookupError("never raised"), Pickler(), main_by_value=False)
    error = rebuild_failure(FailureKind.RAISED, payload, slots, "w", "fn")
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
    await asyncio.wait_for(connection.wait_closed(), 5)
    assert any("malformed failure" in record.message for record in caplog.records)
    await assert_both_alive(pair)


async def hang() -> None:
    await asyncio.Event().wait()
