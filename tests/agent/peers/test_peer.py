"""`Peer`, built alone: calls that are sent, wait, or are held until the end of a turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from arpc.agent.client.deadlines import NEVER, Deadlines
from arpc.agent.client.pending_calls import Call
from arpc.agent.codec import Codec
from arpc.agent.peers.peer import Peer, PeerState
from arpc.errors import OverloadedError, RpcTimeoutError, ShutdownError, WorkerLostError
from arpc.ids import WorkerInfo
from arpc.options import RpcOptions
from arpc.wire.frames import HEADER
from arpc.wire.messages import MessageType
from arpc.wire.values.content import Content
from tests.agent.stage import echo

REQUEST = int(MessageType.REQUEST)
CANCEL = int(MessageType.CANCEL)
CONTENT = Content(b"")


class FakeConnection:
    """Notes what is sent: the ids of calls, and the types of all else."""

    class peer:  # noqa: N801 - an attribute of a connection
        incarnation = 1

    def __init__(self) -> None:
        self.is_open = True
        self.is_congested = False
        self.unsent_bytes = 0
        self.calls: list[int] = []
        self.others: list[tuple[int, int]] = []

    def send_message(self, type_: int, flags: int, id_: int, *_: Any) -> None:
        assert type_ == REQUEST
        self.calls.append(id_)

    def send(self, data: bytes) -> None:
        fields = HEADER.unpack_from(data)
        self.others.append((fields[1], fields[4]))


class Bench:
    """A peer with fake connections."""

    def __init__(self, **options: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.deadlines = Deadlines(self.loop)
        self.attempts = 0
        self.peer = Peer(
            WorkerInfo("other", 1),
            codec=Codec({}, (), 8192),
            deadlines=self.deadlines,
            options=RpcOptions(gc_freeze=False, **options),
            connect=self._connect,
        )

    async def _connect(self, peer: Peer) -> Any:
        self.attempts += 1
        await asyncio.Event().wait()

    def open(self) -> FakeConnection:
        connection: Any = FakeConnection()
        self.peer.opened(connection, main_by_value=False)
        return connection  # type: ignore[no-any-return]

    def call(self, size_bytes: int = 10, tick: int = NEVER) -> tuple[int, Call]:
        """A call that is in the table and has not been sent."""
        call = Call(self.peer, self.loop.create_future(), echo, size_bytes=size_bytes, function_id=1)
        return self.peer.calls.add(tick, call), call


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.peer.aclose()
    made.deadlines.close()


# -- calls that are held


async def test_a_call_that_is_held_is_sent_at_the_end_of_the_turn(bench):
    connection = bench.open()
    call_id, call = bench.call()
    bench.peer.hold(call_id, call, CONTENT)
    assert bench.peer.held(call_id) is call
    assert connection.calls == []
    await asyncio.sleep(0)
    assert connection.calls == [call_id]
    assert bench.peer.held(call_id) is None
    assert call.content is None
    assert bench.peer.in_flight_bytes == call.size_bytes


async def test_the_next_call_sends_those_that_are_held_before_it(bench):
    connection = bench.open()
    held = [bench.call() for _ in range(3)]
    for call_id, call in held:
        bench.peer.hold(call_id, call, CONTENT)
    call_id, call = bench.call()
    bench.peer.submit(call_id, call, CONTENT)
    assert connection.calls == [*(held_id for held_id, _ in held), call_id]
    await asyncio.sleep(0)
    assert len(connection.calls) == 4, "each of them once"


async def test_what_is_changed_while_a_call_is_held_is_sent(bench):
    bench.open()
    call_id, call = bench.call()
    bench.peer.hold(call_id, call, CONTENT)
    bench.peer.held(call_id).content = changed = Content(b"changed")
    sent: list[Any] = []
    bench.peer.connection.send_message = lambda *fields: sent.append(fields[5])
    await asyncio.sleep(0)
    assert sent == [changed]


async def test_without_a_connection_nothing_is_held(bench):
    call_id, call = bench.call()
    bench.peer.hold(call_id, call, CONTENT)
    assert bench.peer.held(call_id) is None
    assert list(bench.peer.backlog) == [call_id]
    assert bench.peer.state is PeerState.CONNECTING


async def test_behind_others_that_wait_nothing_is_held():
    bench = Bench(max_calls_in_flight=1)
    connection = bench.open()
    for _ in range(2):
        bench.peer.submit(*bench.call(), CONTENT)
    call_id, call = bench.call()
    bench.peer.hold(call_id, call, CONTENT)
    assert bench.peer.held(call_id) is None
    assert len(connection.calls) == 1
    assert len(bench.peer.backlog) == 2
    await bench.peer.aclose()


@pytest.mark.parametrize("how", ["cancelled", "completed by hand"])
async def test_a_call_that_ends_while_it_is_held_is_not_sent(bench, how):
    connection = bench.open()
    call_id, call = bench.call()
    bench.peer.hold(call_id, call, CONTENT)
    if how == "cancelled":
        call.recipient.cancel()
        bench.peer.cancel(call_id)
    else:
        call.recipient.set_result(None)
    await asyncio.sleep(0)
    assert connection.calls == []
    assert connection.others == [], "the peer has not heard of it"
    assert len(bench.peer.calls) == 0


async def test_a_call_that_expires_while_it_is_held_certainly_did_not_run(bench):
    connection = bench.open()
    tick = Deadlines.tick(bench.loop.time(), 600)
    call_id, call = bench.call(tick=tick)
    bench.peer.hold(call_id, call, CONTENT)
    bench.peer.calls.expire(tick)
    error = call.recipient.exception()
    assert isinstance(error, RpcTimeoutError)
    assert not error.may_have_run
    await asyncio.sleep(0)
    assert connection.calls == []


async def test_a_connection_that_is_lost_while_a_call_is_held_is_made_again(bench):
    connection = bench.open()
    call_id, call = bench.call()
    bench.peer.hold(call_id, call, CONTENT)
    bench.peer.lost(connection, None, reason=None)
    await asyncio.sleep(0)
    assert list(bench.peer.backlog) == [call_id]
    assert not call.recipient.done()
    assert bench.open().calls == [call_id]


async def test_what_is_held_for_a_worker_that_left_fails(bench):
    connection = bench.open()
    call_id, call = bench.call()
    bench.peer.hold(call_id, call, CONTENT)
    bench.peer.lost(connection, None, reason="it was shut down")
    error = call.recipient.exception()
    assert isinstance(error, WorkerLostError)
    assert not error.may_have_run
    await asyncio.sleep(0)
    assert not bench.peer.backlog
    assert len(bench.peer.calls) == 0


async def test_what_is_held_for_a_worker_is_not_sent_to_its_successor(bench):
    """It was packed for the one before: RRefs and autograd contexts in it mean nothing to another worker."""
    connection = bench.open()
    call_id, call = bench.call()
    bench.peer.hold(call_id, call, CONTENT)
    bench.peer.succeeded_by(WorkerInfo("other", 7))
    with pytest.raises(WorkerLostError, match="started again") as caught:
        call.recipient.result()
    assert not caught.value.may_have_run
    await asyncio.sleep(0)
    assert connection.calls == []


async def test_no_more_are_held_than_may_wait():
    bench = Bench(max_calls_in_flight=1, max_calls_waiting=1)
    connection = bench.open()
    held = [bench.call() for _ in range(3)]
    for call_id, call in held[:2]:
        bench.peer.hold(call_id, call, CONTENT)
    assert connection.calls == [held[0][0]]
    assert list(bench.peer.backlog) == [held[1][0]]
    with pytest.raises(OverloadedError, match="1 calls wait already"):
        bench.peer.hold(*held[2], CONTENT)
    assert len(bench.peer.calls) == 2
    await bench.peer.aclose()


async def test_what_is_held_is_sent_however_little_time_it_has():
    """It has not waited for others to end, so nothing says that it would be answered too late."""
    bench = Bench(max_calls_in_flight=2)
    connection = bench.open()
    bench.peer._answer_s = 1000.0
    call_id, call = bench.call(tick=Deadlines.tick(bench.loop.time(), 10))
    bench.peer.hold(call_id, call, CONTENT)
    await asyncio.sleep(0)
    assert connection.calls == [call_id]
    await bench.peer.aclose()


async def test_closing_ends_what_is_held():
    bench = Bench()
    connection = bench.open()
    call_id, call = bench.call()
    bench.peer.hold(call_id, call, CONTENT)
    await bench.peer.aclose()
    error = call.recipient.exception()
    assert isinstance(error, ShutdownError)
    assert not error.may_have_run
    await asyncio.sleep(0)
    assert connection.calls == []


# -- calls that were sent


async def test_a_call_that_is_cancelled_is_cancelled_there(bench):
    connection = bench.open()
    call_id, call = bench.call()
    bench.peer.submit(call_id, call, CONTENT)
    bench.peer.cancel(call_id)
    bench.peer.cancel(call_id)
    assert connection.others == [(CANCEL, call_id)]
    assert bench.peer.in_flight_bytes == bench.peer.in_flight_calls == 0
    assert bench.peer.calls.pop(call_id) is None, "a reply that comes late finds nobody"


@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_calls_behind_a_large_one_that_ends_while_it_waits_are_sent(how):
    bench = Bench(window_bytes=1 << 20)
    connection = bench.open()
    tick = Deadlines.tick(bench.loop.time(), 0.01) if how == "expired" else NEVER
    running, large, behind = bench.call(600_000), bench.call(900_000, tick), bench.call(100_000)
    for call_id, call in (running, large, behind):
        bench.peer.submit(call_id, call, CONTENT)
    assert connection.calls == [running[0]]
    if how == "expired":
        await asyncio.wait([large[1].recipient], timeout=5)
        await asyncio.sleep(0)
    else:
        large[1].recipient.cancel()
        bench.peer.cancel(large[0])
    assert connection.calls == [running[0], behind[0]]
    assert not bench.peer.backlog
    await bench.peer.aclose()
    bench.deadlines.close()


async def test_a_call_that_is_cancelled_leaves_others_held(bench):
    connection = bench.open()
    first, second = bench.call(), bench.call()
    for call_id, call in (first, second):
        bench.peer.hold(call_id, call, CONTENT)
    bench.peer.cancel(first[0])
    assert bench.peer.held(second[0]) is second[1]
    await asyncio.sleep(0)
    assert connection.calls == [second[0]]


async def test_a_reply_finds_its_call_once(bench):
    bench.open()
    call_id, call = bench.call()
    bench.peer.submit(call_id, call, CONTENT)
    assert bench.peer.calls.pop(call_id) is call
    bench.peer.release(call)
    assert bench.peer.calls.pop(call_id) is None
    assert bench.peer.in_flight_bytes == bench.peer.in_flight_calls == 0
    assert bench.peer.is_at_rest is False, "it is connected"
    assert bench.peer.calls_made == 1
    assert bench.peer.calls_in_flight == 0


async def test_many_calls_that_wait_take_one_attempt_to_connect(bench):
    calls = [bench.call() for _ in range(5)]
    for call_id, call in calls:
        bench.peer.submit(call_id, call, CONTENT)
    await asyncio.sleep(0)
    assert bench.attempts == 1
    assert bench.open().calls == [call_id for call_id, _ in calls]
    assert not bench.peer.backlog


async def test_functions_are_defined_again_on_the_next_connection(bench):
    first = bench.open()
    number = bench.peer.define(echo)
    assert number
    assert bench.peer.define(echo) == number
    assert bench.peer.function_ids == {echo: number}
    bench.peer.lost(first, None, reason=None)
    assert bench.peer.function_ids == {}
    second = bench.open()
    assert bench.peer.function_ids == {echo: number}
    assert [type_ for type_, _ in second.others] == [MessageType.FUNCTION]
    assert bench.peer.define(lambda: None) == 0, "it has no name, and travels by value"


async def test_calls_that_are_lost_say_nothing_of_how_long_the_peer_takes(monkeypatch):
    bench = Bench(max_calls_in_flight=1)
    connection = bench.open()
    bench.peer.submit(*bench.call(), CONTENT)
    waiting_id, waiting = bench.call(tick=Deadlines.tick(bench.loop.time(), 60))
    bench.peer.submit(waiting_id, waiting, CONTENT)
    now = bench.deadlines.now()
    monkeypatch.setattr(bench.deadlines, "now", lambda: now + 35)
    bench.peer.lost(connection, None, reason=None)
    assert (bench.peer.in_flight_bytes, bench.peer.in_flight_calls) == (0, 0)
    assert bench.open().calls == [waiting_id]
    assert not waiting.recipient.done()
    await bench.peer.aclose()


async def test_a_lost_connection_makes_room_for_calls_on_the_next_one():
    bench = Bench(max_calls_in_flight=1)
    first = bench.open()
    bench.peer.submit(*bench.call(), CONTENT)
    waiting_id, waiting = bench.call()
    bench.peer.submit(waiting_id, waiting, CONTENT)
    second = bench.open()
    assert second.calls == []
    bench.peer.lost(first, None, reason=None)
    assert second.calls == [waiting_id]
    await bench.peer.aclose()
