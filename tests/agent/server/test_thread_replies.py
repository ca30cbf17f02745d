"""Answers that threads send themselves: which ones, that each request has one end, and what happens if they cannot."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import copy_context
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import arpc
from arpc.agent.client.deadlines import Deadlines
from arpc.agent.server.functions import Function
from arpc.agent.server.inbound import Inbound
from arpc.agent.server.run import Run
from arpc.agent.server.thread_job import ThreadJob
from arpc.agent.server.thread_replies import ThreadReplies
from arpc.ids import WorkerInfo
from arpc.options import RpcOptions
from arpc.testing import Cluster, cluster
from arpc.transport.sockets import TcpTransport, UnixTransport
from arpc.wire.frames import frame
from arpc.wire.values.content import Content
from tests.agent.leftovers import assert_both_alive, assert_nothing_left, until
from tests.agent.stage import call_on_in_thread, echo, echo_in_thread, hold_in_thread

UNIX = RpcOptions(gc_freeze=False, shared_memory_bytes=0, listen=("unix://",))
KIB = 1 << 10


@asynccontextmanager
async def socket_pair(scheme: str = "unix", **options: Any) -> AsyncIterator[Cluster]:
    """Two workers with a socket between them; none of their tables holds anything in the end."""
    listen = ("unix://",) if scheme == "unix" else ("tcp://127.0.0.1:0",)
    transport = UnixTransport() if scheme == "unix" else TcpTransport()
    async with cluster(2, options=UNIX.replace(listen=listen, **options), transports={scheme: transport}) as group:
        await group[0].rpc_sync("worker1", echo)
        yield group
        await assert_nothing_left(group)


def answered_by_threads(group: Cluster) -> int:
    return group[1].agent.dispatcher.threads.jobs_answered


class Thing:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


# -- which answers


PLAIN = [None, 7, -1.5, "text", b"bytes", True, 2**70, (1, "two", None), [1, [2, {"three": 3}]], {}, "x" * 60 * KIB]


@pytest.mark.parametrize("scheme", ["unix", "tcp"])
async def test_what_is_plain_is_sent_by_its_thread(scheme):
    async with socket_pair(scheme) as group:
        for value in PLAIN:
            result = await group[0].rpc_sync("worker1", echo_in_thread, args=(value,))
            assert result == value
            assert type(result) is type(value)
        assert answered_by_threads(group) == len(PLAIN)


async def test_a_small_tensor_is_sent_by_its_thread():
    async with socket_pair() as group:
        shapes = [(), (5,), (2, 3)]
        # The first reply brings the layout of its tensors along, the second has the loop announce it
        for by_threads in (3, 3, 6):
            for shape in shapes:
                tensor = torch.rand(shape)
                assert torch.equal(await group[0].rpc_sync("worker1", echo_in_thread, args=(tensor,)), tensor)
            assert answered_by_threads(group) == by_threads


async def test_an_object_of_any_class_is_sent_by_its_thread():
    async with socket_pair() as group:
        assert await group[0].rpc_sync("worker1", Thing, args=(3,)) == Thing(3)
        assert answered_by_threads(group) == 1


def fail() -> None:
    raise ZeroDivisionError("on purpose")


def hand_out_a_coroutine() -> Any:
    return echo("awaited")


def switch_off_and_return() -> torch.Tensor:
    result = torch.ones(2)
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    return result


async def test_what_takes_more_is_sent_by_the_loop():
    async with socket_pair() as group:
        assert await group[0].rpc_sync("worker1", bytes, args=(200 * KIB,)) == bytes(200 * KIB)
        assert await group[0].rpc_sync("worker1", hand_out_a_coroutine) == "awaited"
        assert await group[0].rpc_sync("worker1", call_on_in_thread, args=("worker0", echo, 5)) == 5
        assert torch.equal(await group[0].rpc_sync("worker1", torch.ones, args=(300 * KIB,)), torch.ones(300 * KIB))
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            await group[0].rpc_sync("worker1", fail)
        assert answered_by_threads(group) == 0
        assert group[1].agent.dispatcher.calls_handled == 6


async def test_what_a_function_leaves_switched_does_not_show_in_its_answer():
    async with socket_pair() as group:
        assert (await group[0].rpc_sync("worker1", switch_off_and_return)).tolist() == [1.0, 1.0]
        assert await group[0].rpc_sync("worker1", torch.is_grad_enabled)
        assert answered_by_threads(group) == 2


arrived: list[int] = []


async def arrive(number: int) -> None:
    arrived.append(number)


def call_and_forget(number: int) -> None:
    arpc.rpc_async("worker0", arrive, args=(number,))


async def test_an_answer_does_not_overtake_the_calls_of_its_thread():
    arrived.clear()
    async with socket_pair() as group:
        for number in range(20):
            await group[0].rpc_sync("worker1", call_and_forget, args=(number,))
            assert arrived == list(range(number + 1))
        assert answered_by_threads(group) == 0
        await until(group[1].agent.is_quiet)


class _Meter:
    """Remembers which handlers ended."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def handler_ended(self, caller: str, function: str, duration_ns: int) -> None:
        self.ended.append(function)


async def test_who_wants_to_hear_of_the_end_of_a_request_does():
    async with socket_pair() as group:
        meter: Any = _Meter()
        group[1].agent.set_meter(meter)
        await group[0].rpc_sync("worker1", echo_in_thread)
        group[1].agent.set_meter(None)
        await group[0].rpc_sync("worker1", echo_in_thread)
        assert meter.ended == ["echo_in_thread"]
        assert answered_by_threads(group) == 1


# -- together with the rest


async def test_many_at_once_and_the_counters():
    async with socket_pair() as group:
        calls = [group[0].rpc_sync("worker1", echo_in_thread, args=(number,)) for number in range(200)]
        assert await asyncio.gather(*calls) == [*range(200)]
        dispatcher = group[1].agent.dispatcher
        assert dispatcher.calls_handled == 201
        assert dispatcher.statistics()["calls_handled"] == 201
        assert dispatcher.threads.statistics()["jobs_unfinished"] == 0
        peers = [group[0].statistics()["peers"]["worker1"], group[1].statistics()["peers"]["worker0"]]
        assert peers[0]["bytes_received"] == peers[1]["bytes_sent"]
        assert peers[1]["frames_sent"] >= 201


async def test_requests_that_wait_for_room_get_it_when_a_thread_has_answered():
    async with socket_pair(max_handlers_per_peer=2) as group:
        calls = [group[0].rpc_sync("worker1", echo_in_thread, args=(number,)) for number in range(200)]
        async with asyncio.timeout(20):
            assert await asyncio.gather(*calls) == [*range(200)]
        (link,) = group[1].agent.connector.links
        assert not link.waiting


async def test_a_call_that_is_cancelled_in_its_thread_is_counted_once(make_stage):
    stage = make_stage()
    async with socket_pair() as group:
        dispatcher = group[1].agent.dispatcher
        call = asyncio.create_task(group[0].rpc_sync("worker1", hold_in_thread))
        await stage.wait_until("held begun")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: dispatcher.replies.calls_failed == 1)
        stage.open()
        await assert_nothing_left(group)
        assert dispatcher.calls_handled == 2
        await assert_both_alive(group)


async def test_a_deadline_that_passes_in_a_thread_is_the_end(make_stage):
    stage = make_stage()
    async with socket_pair() as group:
        call = group[0].rpc_async("worker1", hold_in_thread, timeout=0.5)
        await stage.wait_until("held begun")
        with pytest.raises(arpc.RpcTimeoutError):
            await call
        await until(lambda: group[1].agent.dispatcher.replies.calls_failed == 1)
        stage.open()
        await assert_nothing_left(group)
        assert group[1].agent.dispatcher.calls_handled == 2


async def test_a_connection_that_ends_under_a_thread_does_no_harm(make_stage):
    stage = make_stage()
    async with socket_pair() as group:
        call = asyncio.create_task(group[0].rpc_sync("worker1", hold_in_thread))
        await stage.wait_until("held begun")
        group[0].agent.known_peer("worker1").connection.abort()
        with pytest.raises(arpc.WorkerLostError):
            await call
        stage.open()
        await assert_nothing_left(group)
        await assert_both_alive(group)


async def test_a_peer_that_does_not_read_gets_its_answers_later(make_stage):
    """The thread finds the connection full, and leaves its answer to the loop."""
    stage = make_stage()
    async with socket_pair() as group:
        call = asyncio.create_task(group[0].rpc_sync("worker1", hold_in_thread, args=("held", "late")))
        await stage.wait_until("held begun")
        connection = group[1].agent.known_peer("worker0").connection
        connection.pause_writing()
        stage.open()
        assert await call == "late"
        assert connection._write_lock.writes == 0, "a thread has written to a connection that is full"
        connection.resume_writing()


@pytest.mark.parametrize("seed", range(2))
async def test_a_storm_of_everything(seed):
    """Small, large and failing answers of threads and of the loop, some of them not wanted any more."""
    generator = torch.Generator().manual_seed(seed)

    def chance() -> float:
        return float(torch.rand((), generator=generator))

    outcomes: Counter[str] = Counter()

    async def call(number: int) -> None:
        timeout = 0.002 if chance() < 0.1 else 60
        function = echo if chance() < 0.2 else echo_in_thread
        value: Any = number if chance() < 0.7 else bytes([number % 256]) * int(chance() * 300 * KIB)
        if chance() < 0.05:
            with pytest.raises(ZeroDivisionError):
                await group[0].rpc_sync("worker1", fail)
            outcomes["failed"] += 1
            return
        try:
            assert await group[0].rpc_sync("worker1", function, args=(value,), timeout=timeout) == value
        except arpc.RpcTimeoutError:
            outcomes["late"] += 1
        else:
            outcomes["answered"] += 1

    async with socket_pair(num_worker_threads=4) as group:
        calls = [asyncio.create_task(call(number)) for number in range(400)]
        await asyncio.sleep(0)
        for number, task in enumerate(calls):
            if number % 9 == 0:
                task.cancel()
                outcomes["cancelled"] += 1
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
        assert sum(outcomes.values()) == 400
        await assert_both_alive(group)


# -- one end for each request, whatever comes first


class _Line:
    """A connection, its turn to write and its dispatcher in one, for requests that end in any order."""

    def __init__(self) -> None:
        self.loop = self
        self.is_closed = False
        self.is_blocked = False
        self.lock = threading.RLock()
        self.sent: list[bytes] = []
        self.ended: list[int] = []
        self.callbacks: list[Any] = []
        self.time = lambda: 0.0
        self.worker = None
        self.threads = self
        self.replies = self
        self.is_ahead = False
        self.is_peer_elsewhere = False

    def send(self, data: Any) -> bool:
        if isinstance(data, list):  # as a `WriteLock`
            if not self.is_blocked:
                self.sent += data
            return not self.is_blocked
        self.sent.append(data)  # as a `Connection`
        return True

    def call_soon_threadsafe(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def raised(self, run: Run, error: BaseException) -> None:
        if not run.ended:
            run.ended = True
            self.ended.append(run.id)
            run.inbound.forget(run)

    def frame_in_thread(self, type_: int, id_: int, content: Any) -> bytes:
        assert content.schema is None
        return frame(type_, 0, id_, 0, 0, content.pickle)


def encode(_: Run, result: Any) -> Content:
    return Content(b"%d" % result)


_events = st.sampled_from(["work", "cancel", "expire", "send", "send on loop", "turn", "block"])


@given(st.lists(st.tuples(_events, st.integers(0, 4)), max_size=40))
def test_each_request_has_one_end(events):
    line: Any = _Line()
    deadlines: Any = Deadlines.__new__(Deadlines)
    inbound = Inbound(line, WorkerInfo("caller", 0), deadlines, max_handlers=100, main_by_value=False)
    replies = ThreadReplies(inbound, line, encode, lambda _: None)
    runs = [Run(line, inbound, Function(len), number, 0, copy_context(), args=("",)) for number in range(5)]
    for run in runs:
        inbound.register(run)
    worked: set[int] = set()
    for event, number in events:
        run = runs[number]
        if event == "work" and number not in worked:
            worked.add(number)
            assert ThreadJob(run, replies).work() is (None if run.ended else replies)
            assert number not in inbound.running, "a cancellation comes too late now"
        elif event == "cancel":
            inbound.cancel(number)
        elif event == "expire":
            run.expire()
        elif event == "send":
            replies.send()
        elif event == "send on loop":
            replies.send_on_loop()
        elif event == "turn":
            while line.callbacks:
                line.callbacks.pop(0)()
        else:
            line.is_blocked = not line.is_blocked
    for run in runs:
        if run.id not in worked:
            ThreadJob(run, replies).work()
    line.is_blocked = False
    replies.send()
    answered = [int.from_bytes(data[8:16], "little") for data in line.sent]
    assert sorted([*answered, *line.ended]) == [0, 1, 2, 3, 4]
    assert not inbound.running


# -- how many go at once


class _Caller:
    """Has requests under way, and finds all answers in its socket at once."""

    def __init__(self) -> None:
        self.connection: Any = self
        self.turn: Any = self
        self.is_peer_elsewhere = True
        self.is_full = False
        self.running: range = range(0)

    def send(self, frames: list[bytes]) -> bool:
        return True

    def portions(self, replies: ThreadReplies, running: int, writes: int = 1) -> int:
        """How many answers may go at once after so many writes, with so many requests under way."""
        self.running = range(running - 2)
        for _ in range(writes):
            replies._answers += [b""] * 2
            replies.send()
        return replies.answers_a_write


LOOK = 33


@pytest.fixture
def caller() -> _Caller:
    return _Caller()


@pytest.fixture
def replies(caller: _Caller) -> ThreadReplies:
    return ThreadReplies(caller, caller.turn, encode, lambda _: None)


@pytest.mark.parametrize(("running", "portion"), [(1, 8), (16, 8), (40, 20), (64, 32), (1000, 32)])
def test_half_goes_ahead_if_the_peer_has_another_cpu(caller, replies, running, portion):
    assert replies.answers_a_write == 32
    assert caller.portions(replies, running) == portion


def test_one_answer_at_a_time_finds_out_nothing(caller, replies):
    caller.running = range(16)
    replies._answers.append(b"")
    replies.send()
    assert replies.answers_a_write == 32


def test_on_one_cpu_all_go_at_once(caller, replies):
    caller.is_peer_elsewhere = False
    assert caller.portions(replies, 16) == 32
    assert caller.portions(replies, 1000) == 32


def test_what_is_under_way_is_taken_at_its_most(caller, replies):
    """Most of it may be in a socket at the moment."""
    caller.portions(replies, 64)
    assert caller.portions(replies, 8) == 32
    assert caller.portions(replies, 16, LOOK) == 8, "not for ever"


def test_a_peer_that_is_moved_is_noticed(caller, replies):
    assert caller.portions(replies, 16) == 8
    caller.is_peer_elsewhere = False
    assert caller.portions(replies, 16, LOOK) == 32
    caller.is_peer_elsewhere = True
    assert caller.portions(replies, 16, LOOK) == 8


async def test_a_socket_knows_whether_its_peer_is_elsewhere(monkeypatch):
    async with socket_pair() as group:
        await group[0].rpc_sync("worker1", echo_in_thread)
        (inbound,) = group[1].agent.connector.links
        for cpus, is_elsewhere in (({0}, False), ({0, 1}, True)):
            monkeypatch.setattr("arpc.transport.busy_poll._own_cpus", lambda cpus=cpus: cpus)
            monkeypatch.setattr("os.sched_getaffinity", lambda _, cpus=cpus: cpus, raising=False)
            assert inbound.connection.is_peer_elsewhere is is_elsewhere
