"""Functions, arguments and results that cannot travel: that call fails, with the name of what was at fault."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

import arpc
from arpc.errors import (
    RemoteError,
    SerializationError,
)
from tests.agent.leftovers import assert_both_alive
from tests.agent.stage import echo


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
    with pytest.raises(SerializationError, match=r"the result of \w+ \(Violent\) cannot be sent: SystemExit"):
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
    codec = pair[1].agent.codec
    unpack = codec.function

    def unpack_without_the_module(message: Any, sender: Any) -> Any:
        monkeypatch.delitem(sys.modules, module.__name__)
        return unpack(message, sender)

    monkeypatch.setattr(codec, "function", unpack_without_the_module)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    text = r"not on worker 'worker1'.*only_at_the_caller.*importable there"
    with pytest.raises(SerializationError, match=text):
        await pair[0].rpc_sync("worker1", module.here_only)
    with pytest.raises(SerializationError, match=text) as caught:
        await pair[0].rpc_sync("worker1", module.here_only)
    assert caught.value.__cause__.stack.count("Traceback") <= 2, "each failure tells its own story only"
    await assert_both_alive(pair)


async def test_arguments_by_name_come_in_a_dict(pair):
    with pytest.raises(TypeError, match="kwargs must be a dict of arguments by name, not list"):
        await pair[0].rpc_sync("worker1", echo, kwargs=[3])
