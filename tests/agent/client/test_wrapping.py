"""Whoever wraps the sender sees every request of a worker, whatever it is for and whoever makes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

import arpc
from arpc.agent.client.pending_calls import Call, CallSender
from arpc.testing import Cluster, cluster
from arpc.wire.messages import MessageType, RequestFlag
from tests.agent.leftovers import assert_nothing_left, until
from tests.agent.stage import call_on, call_on_in_thread, echo, echo_in_thread


class Watch:
    """Notes the requests of one worker, and hands them on."""

    def __init__(self, inner: CallSender) -> None:
        self.inner = inner
        self.calls: list[Call] = []
        self.arguments: list[Any] = []
        """Of each call args and kwargs, which it does not keep once they are packed."""

    def send(self, call: Call) -> int:
        assert call.peer is not None, "whom it is for is known"
        self.calls.append(call)
        self.arguments.append((call.args, call.kwargs))
        return self.inner.send(call)

    @property
    def types(self) -> list[MessageType]:
        return [MessageType(call.type) for call in self.calls]


class Watched:
    """Two workers, and what is seen of their requests."""

    def __init__(self, group: Cluster) -> None:
        self.group = group
        self.here, self.there = group[0], group[1]
        self.watches: list[Watch] = []
        for worker in group:
            worker.agent.wrap_sender(self._watch)

    def _watch(self, inner: CallSender) -> Watch:
        self.watches.append(Watch(inner))
        return self.watches[-1]

    @property
    def seen(self) -> Watch:
        """What the first worker sends."""
        return self.watches[0]

    async def until_sent(self, message_type: MessageType) -> Call:
        await until(lambda: message_type in self.seen.types, lambda: self.seen.types)
        return self.seen.calls[self.seen.types.index(message_type)]


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    async with cluster(2) as group:
        await group[0].rpc_sync("worker1", echo)
        yield Watched(group)
        await assert_nothing_left(group)


class Counter:
    """Something remote with a method."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int) -> int:
        self.count += number
        return self.count


async def count_up(to: int) -> Any:
    for number in range(to):
        yield number


factor = torch.full((), 2.0, requires_grad=True)


async def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * factor  # whose gradient stays there until the context ends


# -- calls


async def test_a_call_that_is_awaited(watched):
    assert await watched.here.rpc_sync("worker1", echo, args=(1,)) == 1
    (call,) = watched.seen.calls
    assert (call.type, call.function, call.is_awaited) == (MessageType.REQUEST, echo, True)
    assert watched.seen.arguments == [((1,), None)]
    assert call.peer.info == watched.there.info


async def test_a_call_whose_future_is_handed_out(watched):
    assert await watched.here.rpc_async("worker1", echo, kwargs={"value": 2}) == 2
    (call,) = watched.seen.calls
    assert (call.type, call.function, call.is_awaited) == (MessageType.REQUEST, echo, False)
    assert watched.seen.arguments == [((), {"value": 2})]


async def test_a_stream(watched):
    assert [item async for item in watched.here.stream("worker1", count_up, args=(3,))] == [0, 1, 2]
    (call,) = watched.seen.calls
    assert (call.type, call.function) == (MessageType.REQUEST, count_up)
    assert call.flags & RequestFlag.STREAM


async def test_a_call_to_oneself(watched):
    assert await watched.here.rpc_sync("worker0", echo, args=(1,)) == 1
    assert [call.peer.info.name for call in watched.seen.calls] == ["worker0"]


@pytest.mark.parametrize("function", [call_on, call_on_in_thread])
async def test_a_call_of_a_handler_on_the_loop_or_in_a_thread(watched, function):
    assert await watched.there.rpc_sync("worker0", function, args=("worker1", echo_in_thread, 3)) == 3
    assert [call.function for call in watched.seen.calls] == [echo_in_thread]


async def test_a_call_of_a_thread_of_the_users(watched):
    assert await asyncio.to_thread(lambda: watched.here.rpc_async("worker1", echo, args=(4,)).wait()) == 4
    (call,) = watched.seen.calls
    assert (call.function, watched.seen.arguments) == (echo, [((4,), None)])


async def test_a_call_to_a_worker_that_is_asked_for_first():
    async with cluster(1, elastic=True) as group:
        seen: list[Call] = []

        class Note(Watch):
            def send(self, call: Call) -> int:
                seen.append(call)
                return super().send(call)

        group[0].agent.wrap_sender(Note)
        await group.add("newcomer")
        assert await group[0].rpc_sync("newcomer", echo, args=(1,)) == 1
        assert [call.peer.info.name for call in seen] == ["newcomer"]


# -- RRefs


async def test_a_creation(watched):
    rref = watched.here.remote("worker1", Counter)
    await rref
    call = await watched.until_sent(MessageType.RREF_CREATE)
    assert call.function is Counter
    await rref.release()


async def test_a_fetch(watched):
    rref = watched.here.remote("worker1", echo, args=([1, 2],))
    assert await rref == [1, 2]
    assert await rref.to_here() == [1, 2]
    assert watched.seen.types[0] is MessageType.RREF_CREATE
    await watched.until_sent(MessageType.RREF_FETCH)
    await rref.release()


async def test_a_method_of_a_remote_object(watched):
    rref = watched.here.remote("worker1", Counter)
    assert await rref.rpc_sync().add(2) == 2
    assert await rref.rpc_async().add(3) == 5
    requests = [call for call in watched.seen.calls if call.type == MessageType.REQUEST]
    assert len(requests) == 2
    await rref.release()


async def test_control_messages(watched):
    rref = watched.here.remote("worker1", Counter)
    await rref
    await rref.release()
    call = await watched.until_sent(MessageType.RREF_USER_DELETE)
    assert call.peer.info == watched.there.info


# -- autograd


async def test_messages_of_a_backward_pass(watched):
    x = torch.ones(3, requires_grad=True)
    async with arpc.autograd.context() as context_id:
        y = await watched.here.rpc_sync("worker1", scaled, args=(x,))
        await arpc.autograd.backward(context_id, [y.sum()])
        assert arpc.autograd.get_gradients(context_id)[x].tolist() == [2, 2, 2]
    release = await watched.until_sent(MessageType.AUTOGRAD_RELEASE)
    assert watched.seen.types[:2] == [MessageType.REQUEST, MessageType.AUTOGRAD_GRADIENTS]
    assert release.is_internal


# -- wrappers themselves


async def test_a_wrapper_may_refuse_a_request(watched):
    class Refuse(Watch):
        def send(self, call: Call) -> int:
            if call.function is echo_in_thread:
                raise LookupError("refused by a wrapper")
            return super().send(call)

    watched.here.agent.wrap_sender(Refuse)
    with pytest.raises(LookupError, match="refused by a wrapper"):
        await watched.here.rpc_sync("worker1", echo_in_thread)
    with pytest.raises(LookupError, match="refused by a wrapper"):
        watched.here.rpc_async("worker1", echo_in_thread)
    with pytest.raises(LookupError, match="refused by a wrapper"):
        await asyncio.to_thread(lambda: watched.here.rpc_async("worker1", echo_in_thread).wait())
    assert await watched.here.rpc_sync("worker1", echo, args=(1,)) == 1


async def test_a_wrapper_may_change_a_request(watched):
    class Double(Watch):
        def send(self, call: Call) -> int:
            call.args = tuple(2 * value for value in call.args or ())
            return super().send(call)

    watched.here.agent.wrap_sender(Double)
    assert await watched.here.rpc_sync("worker1", echo, args=(4,)) == 8


async def test_wrappers_are_put_around_each_other_and_stay(watched):
    """Each sees what the one that came later lets through, and a meter that comes and goes takes none away."""
    log: list[str] = []

    def named(name: str) -> Any:
        class Named(Watch):
            def send(self, call: Call) -> int:
                log.append(name)
                return super().send(call)

        return Named

    agent = watched.here.agent
    agent.wrap_sender(named("inner"))
    agent.wrap_sender(named("outer"))
    assert agent.is_wrapped
    await watched.here.rpc_sync("worker1", echo)
    assert log == ["outer", "inner"]
    agent.set_meter(Silent())
    await watched.here.rpc_sync("worker1", echo)
    agent.set_meter(None)
    await watched.here.rpc_sync("worker1", echo)
    assert log == ["outer", "inner"] * 3


class Silent:
    """A meter that keeps nothing."""

    def call_ended(self, peer: str, function: Any, duration_ns: int, error: BaseException | None) -> None: ...
    def handler_ended(self, caller: str, function: str, duration_ns: int) -> None: ...
    def handler_failed(self, caller: str, function: str, error: BaseException) -> None: ...
