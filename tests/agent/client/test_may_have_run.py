"""`may_have_run` is about the call that raises, and about nothing that its handler did.

A handler on worker1 makes a call of its own that certainly does not run, and lets the error of that call pass in some
way. What worker0 sees says that the handler may have run: it did.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import arpc
from arpc.errors import WireError
from arpc.functions import async_execution
from arpc.runtime import current
from arpc.testing import Fault, FaultyTransport, cluster
from arpc.transport.memory import MemoryNetwork
from arpc.wire.messages import MessageType, Request
from tests.agent.leftovers import assert_nothing_left
from tests.agent.stage import echo, hold

OPTIONS = arpc.RpcOptions(gc_freeze=False, rpc_timeout=20, rref_grace=0.2)
seen: list[BaseException] = []
"""The errors that handlers met in calls of their own."""
ran: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_seen_yet() -> Iterator[None]:
    seen.clear()
    ran.clear()
    yield
    seen.clear()


@pytest.fixture
async def group():
    """Four workers, of which worker3 has left: calls to it are not sent."""
    async with cluster(4, options=OPTIONS, elastic=True) as group:
        for worker in group:
            await worker.rpc_sync("worker3", echo)
        await group[3].shutdown(graceful=False)
        yield group


class Unpacked:
    """Cannot be unpacked where it arrives."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _not_there, ()


def _not_there() -> None:
    raise LookupError("it is not there")


async def run() -> None:
    ran.append("run")


def run_in_thread() -> None:
    ran.append("run_in_thread")


async def run_items() -> AsyncIterator[int]:
    ran.append("run_items")
    yield 1


# -- how a call may fail that certainly does not run

INNER: dict[str, tuple[Any, ...]] = {
    "lost": ("worker3", echo, ()),
    "unknown": ("nobody", echo, ()),
    "unsendable": ("worker2", echo, (threading.Lock(),)),
    "unpacked": ("worker2", echo, (Unpacked(),)),
}


class GroupError(arpc.WorkerLostError):
    """An error of a user that is rebuilt with everything it had."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(vars(self)))


def _rebuild(cls: type[GroupError], args: tuple[Any, ...], attributes: dict[str, Any]) -> GroupError:
    made = cls(*args)
    vars(made).update(attributes)
    return made


class FixedError(arpc.OverloadedError):
    """An error of a user that has its own opinion."""

    @property
    def may_have_run(self) -> bool:
        return True

    @may_have_run.setter
    def may_have_run(self, _: bool) -> None:
        raise SystemExit(1)


# -- how a handler lets an error pass


def _passed_on(error: BaseException, form: str) -> BaseException:
    if form == "itself":
        return error
    if form == "grouped":
        return ExceptionGroup("some of them", [ValueError(), ExceptionGroup("more", [error])])
    if form == "from":
        error.__cause__ = ValueError("the reason")
        return error
    if form == "pickled":
        return pickle.loads(pickle.dumps(error))
    if form == "rebuilt":
        return GroupError("lost", "worker3", may_have_run=False)
    assert form == "by hand"
    return arpc.WorkerLostError("lost", "worker1", may_have_run=False)


FORMS = ["itself", "grouped", "from", "pickled", "rebuilt", "by hand"]


async def fail(inner: str, form: str) -> None:
    to, function, args = INNER[inner]
    try:
        await arpc.rpc_sync(to, function, args)
    except arpc.ArpcError as error:
        seen.append(error)
        raise _passed_on(error, form) from error.__cause__


async def fail_later(inner: str, form: str) -> None:
    await asyncio.sleep(0)
    await fail(inner, form)


def fail_in_thread(inner: str, form: str) -> None:
    to, function, args = INNER[inner]
    try:
        arpc.rpc_async(to, function, args).wait()
    except arpc.ArpcError as error:
        seen.append(error)
        raise _passed_on(error, form) from error.__cause__


async def fail_items(inner: str, form: str) -> AsyncIterator[int]:
    await fail(inner, form)
    yield 1


async def fail_after_an_item(inner: str, form: str) -> AsyncIterator[int]:
    yield 1
    await fail(inner, form)


def fail_items_in_thread(inner: str, form: str) -> Iterator[int]:
    fail_in_thread(inner, form)
    yield 1


@arpc.batched(max_size=2, max_wait_ms=1)
async def fail_in_batch(inner: list[str], form: list[str]) -> list[None]:
    await fail(inner[0], form[0])
    return []


@arpc.batched(max_size=2, max_wait_ms=1)
def fail_in_batch_in_thread(inner: list[str], form: list[str]) -> list[None]:
    fail_in_thread(inner[0], form[0])
    return []


@async_execution
def fail_as_future(inner: str, form: str) -> arpc.Future[None]:
    return arpc.rpc_async("worker1", fail, (inner, form))


@async_execution
def fail_in_callback(inner: str, form: str) -> arpc.Future[None]:
    async def then(_: arpc.Future[None]) -> None:
        await fail(inner, form)

    return arpc.rpc_async("worker1", echo).then(then)


@arpc.inline
def fail_again() -> None:
    """Raises the error of a call that another handler made."""
    raise seen[0]


async def fail_at(inner: str, form: str, way: list[str]) -> None:
    """Calls itself on one worker after the other, and fails on the last."""
    if way:
        await arpc.rpc_sync(way[0], fail_at, (inner, form, way[1:]))
    else:
        await fail(inner, form)


class Thing:
    """Fails in its methods as the functions above do."""

    def __init__(self, inner: str = "", form: str = "") -> None:
        if inner:
            fail_in_thread(inner, form)

    async def fail(self, inner: str, form: str) -> None:
        await fail(inner, form)

    def fail_in_thread(self, inner: str, form: str) -> None:
        fail_in_thread(inner, form)

    async def fail_items(self, inner: str, form: str) -> AsyncIterator[int]:
        await fail(inner, form)
        yield 1

    async def name(self) -> str:
        return "thing"


async def stored(worker: arpc.Worker, inner: str, form: str) -> None:
    await asyncio.gather(worker.rpc_sync("worker1", fail, (inner, form)), return_exceptions=True)
    await worker.rpc_sync("worker1", fail_again)


async def items(stream: AsyncIterator[Any]) -> None:
    async for _ in stream:
        pass


async def method_of(worker: arpc.Worker, name: str, *args: Any) -> None:
    thing = worker.remote("worker1", Thing)
    await getattr(thing.rpc_sync(), name)(*args)


async def stream_of(worker: arpc.Worker, *args: Any) -> None:
    thing = worker.remote("worker1", Thing)
    await items(thing.stream().fail_items(*args))


def blocking(worker: arpc.Worker, *args: Any) -> Any:
    return asyncio.to_thread(worker.rpc_async("worker1", fail, args).wait)


WAYS: dict[str, Any] = {
    "async": lambda worker, *args: worker.rpc_sync("worker1", fail, args),
    "async with a future": lambda worker, *args: worker.rpc_async("worker1", fail, args),
    "async that waits": lambda worker, *args: worker.rpc_sync("worker1", fail_later, args),
    "def": lambda worker, *args: worker.rpc_sync("worker1", fail_in_thread, args),
    "waited for in a thread": blocking,
    "stream": lambda worker, *args: items(worker.stream("worker1", fail_items, args)),
    "stream after an item": lambda worker, *args: items(worker.stream("worker1", fail_after_an_item, args)),
    "stream of def": lambda worker, *args: items(worker.stream("worker1", fail_items_in_thread, args)),
    "batched": lambda worker, *args: worker.rpc_sync("worker1", fail_in_batch, args),
    "batched def": lambda worker, *args: worker.rpc_sync("worker1", fail_in_batch_in_thread, args),
    "async_execution": lambda worker, *args: worker.rpc_sync("worker1", fail_as_future, args),
    "then": lambda worker, *args: worker.rpc_sync("worker1", fail_in_callback, args),
    "stored": stored,
    "method": lambda worker, *args: method_of(worker, "fail", *args),
    "method def": lambda worker, *args: method_of(worker, "fail_in_thread", *args),
    "stream of method": stream_of,
    "creation": lambda worker, *args: worker.remote("worker1", fail, args).to_here(),
    "creation of an object": lambda worker, *args: worker.remote("worker1", Thing, args).to_here(),
    "creation by a method": lambda worker, *args: worker.remote("worker1", Thing).remote().fail(*args).to_here(),
    "method of what was not created": lambda worker, *args: worker.remote("worker1", Thing, args).rpc_sync().name(),
    "creation here": lambda worker, *args: worker.remote("worker0", fail, args).to_here(),
    "local value": lambda worker, *args: worker.remote("worker0", fail, args).local_value(),
    "here": lambda worker, *args: worker.rpc_sync("worker0", fail, args),
    "chain": lambda worker, *args: worker.rpc_sync("worker1", fail_at, (*args, ["worker2"])),
    "long chain": lambda worker, *args: worker.rpc_sync(
        "worker1", fail_at, (*args, ["worker2", "worker0", "worker1", "worker2"])
    ),
}


async def error_of(way: Any) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which it is, is looked at by the test
        await way
    return caught.value


def leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [error, *(leaf for member in error.exceptions for leaf in leaves(member))]
    return [error]


@pytest.mark.parametrize("way", WAYS)
async def test_an_error_that_a_handler_passes_on_may_have_run(group, way):
    for inner in INNER:
        seen.clear()
        error = await error_of(WAYS[way](group[0], inner, "itself"))
        assert isinstance(error, type(seen[0]))
        assert not isinstance(error, arpc.OwnerLostError)
        assert error.may_have_run
        if inner == "lost":
            assert error.worker == "worker3"


@pytest.mark.parametrize("way", WAYS)
async def test_in_whatever_form_it_is_passed_on(group, way):
    for form in FORMS:
        seen.clear()
        error = await error_of(WAYS[way](group[0], "lost", form))
        found = [leaf for leaf in leaves(error) if isinstance(leaf, arpc.ArpcError)]
        assert found
        assert all(leaf.may_have_run for leaf in found)
        assert not any(isinstance(leaf, arpc.OwnerLostError) for leaf in found)


async def test_the_handler_itself_learns_that_its_call_did_not_run(group):
    for inner in INNER:
        await error_of(group[0].rpc_sync("worker1", fail, (inner, "itself")))
    assert [error.may_have_run for error in seen] == [False] * len(INNER)


async def raise_fixed() -> None:
    raise FixedError("too much")


async def test_an_error_that_refuses_to_be_told_ends_its_call_only(group):
    assert isinstance(await error_of(group[0].rpc_sync("worker1", raise_fixed)), FixedError)
    assert await group[0].rpc_sync("worker1", echo, ("alive",)) == "alive"


# -- what the callee refuses did not run


REFUSED: dict[str, Any] = {
    "async": lambda worker, argument: worker.rpc_sync("worker1", run, (argument,)),
    "def": lambda worker, argument: worker.rpc_sync("worker1", run_in_thread, (argument,)),
    "def by name": lambda worker, argument: worker.rpc_sync("worker1", run_in_thread, (), {"x": argument}),
    "by value": lambda worker, argument: worker.rpc_sync("worker1", lambda _: ran.append("lambda"), (argument,)),
    "stream": lambda worker, argument: items(worker.stream("worker1", run_items, (argument,))),
    "method": lambda worker, argument: method_of(worker, "name", argument),
    # not by `to_here`, which is a call of its own: that does run if it overtakes the news of the creation
    "creation": lambda worker, argument: worker.remote("worker1", run, (argument,))._get_future(),
}


@pytest.mark.parametrize("way", REFUSED)
async def test_a_call_whose_arguments_cannot_be_unpacked_did_not_run(group, way):
    for _ in range(3):  # the first goes another way than those after it
        error = await error_of(REFUSED[way](group[0], Unpacked()))
        assert isinstance(error, arpc.SerializationError)
        assert not error.may_have_run
    assert not ran


@pytest.mark.parametrize("function", [run, run_in_thread, run_items])
async def test_a_call_that_is_not_allowed_did_not_run(function):
    async with cluster(2, options=OPTIONS.replace(allow="exported")) as group:
        for _ in range(3):
            if function is run_items:
                error = await error_of(items(group[0].stream("worker1", function)))
            else:
                error = await error_of(group[0].rpc_sync("worker1", function))
            assert isinstance(error, arpc.NotAllowedError)
            assert not error.may_have_run
    assert not ran


async def test_a_call_that_the_callee_has_no_room_for_did_not_run(stage):
    options = OPTIONS.replace(max_handlers_per_peer=1, max_requests_waiting=1)
    async with cluster(2, options=options) as group:
        calls = [group[0].rpc_async("worker1", hold, (f"n{number}",)) for number in range(5)]
        await stage.wait_until("n0 begun")
        error = await error_of(calls[-1])
        assert isinstance(error, arpc.OverloadedError)
        assert not error.may_have_run
        for call in calls:
            call.cancel()
        await assert_nothing_left(group)


async def test_a_call_that_comes_when_the_callee_shuts_down_did_not_run(group):
    group[1].agent._handlers[Request] = group[1].agent.dispatcher.refuse  # as `Agent.aclose` does
    for link in group[1].agent.connector.links:
        link.connection.protocol.direct = {}
        link.connection.protocol.bare = {}
    error = await error_of(group[0].rpc_sync("worker1", run, (1,)))
    assert isinstance(error, arpc.ShutdownError)
    assert not error.may_have_run


# -- lost workers


async def test_the_owner_is_lost_only_if_it_is_the_owner_that_is_lost(group):
    thing = group[0].remote("worker1", Thing)
    for _ in range(3):
        error = await error_of(thing.rpc_sync().fail("lost", "itself"))
        assert type(error) is arpc.WorkerLostError
        assert error.worker == "worker3"
        # even if the handler raises what the runtime would raise about the owner
        error = await error_of(thing.rpc_sync().fail("lost", "by hand"))
        assert type(error) is arpc.WorkerLostError
        assert await thing.rpc_sync().name() == "thing"


@pytest.mark.parametrize("way", ["method", "stream"])
async def test_a_call_of_a_lost_owner_that_was_sent_may_have_run(way):
    network = FaultyTransport(MemoryNetwork())
    async with cluster(2, options=OPTIONS, elastic=True, transports={"memory": network}) as group:
        thing = group[0].remote("worker1", Thing)
        assert await thing.rpc_sync().name() == "thing"
        network.inject(Fault(MessageType.REQUEST, "cut", count=1))
        call = thing.rpc_sync().name() if way == "method" else items(thing.stream().fail_items("lost", "itself"))
        error = await error_of(call)
        assert isinstance(error, arpc.OwnerLostError)
        assert error.worker == "worker1"
        assert error.may_have_run


async def test_a_call_of_an_owner_that_has_left_did_not_run(group):
    thing = group[0].remote("worker2", Thing)
    assert await thing.rpc_sync().name() == "thing"
    await group[2].shutdown(graceful=False)
    for call in (thing.rpc_sync().name, thing.remote().name, thing.stream().name):
        with pytest.raises(arpc.OwnerLostError) as caught:
            call()
        assert caught.value.worker == "worker2"
        assert not caught.value.may_have_run


async def lose(name: str) -> None:
    worker = arpc.get_worker_info(name)
    current().agent.peer(worker).connection.abort(WireError("cut by the test"))


async def hold_at(name: str, point: str) -> None:
    await arpc.rpc_sync(name, hold, (point,))


async def test_a_connection_that_breaks_further_on_is_not_the_callers(group, stage):
    call = group[0].rpc_async("worker1", hold_at, ("worker2", "held"))
    await stage.wait_until("held begun")
    await group[0].rpc_sync("worker1", lose, ("worker2",))
    error = await error_of(call)
    assert type(error) is arpc.WorkerLostError
    assert error.worker == "worker2"
    assert error.may_have_run
