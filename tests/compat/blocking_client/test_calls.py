"""Calls of threads on connections of their own, between workers of one process that meet over unix sockets or TCP."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from arpc.agent.hooks.observers import Observer
from arpc.agent.hooks.timing import Meter
from arpc.agent.peers.admission import MAX_THREADS, THREAD_HANDLERS
from arpc.compat.blocking_client import calls as blocking_module
from arpc.compat.blocking_client import thread_connections as pool_module
from arpc.compat.blocking_client.calls import TAKES_LOOP, BlockingCalls
from arpc.compat.blocking_client.thread_connection import NotSentError
from arpc.compat.blocking_client.thread_connections import ThreadConnections
from arpc.errors import (
    CallCancelledError,
    RpcTimeoutError,
    SerializationError,
    ShutdownError,
    WireError,
    WorkerLostError,
)
from arpc.options import UNSET, RpcOptions, Unset
from arpc.testing import Cluster, cluster
from arpc.transport.sockets import TcpTransport, UnixTransport
from arpc.wire.frames import frame
from arpc.wire.messages import MessageType
from tests.agent.leftovers import assert_both_alive, assert_nothing_left, until
from tests.agent.stage import Stage, echo, echo_in_thread, hold, hold_in_thread

QUIET = RpcOptions(gc_freeze=False, shared_memory_bytes=0, listen=("unix://",))


class Threads:
    """Makes blocking calls of worker0, as the threads of a drop-in do."""

    def __init__(self, group: Cluster) -> None:
        self.agent = group[0].agent
        self.calls = BlockingCalls(self.agent)
        self.peer = self.agent.known_peer("worker1")

    @property
    def connections(self) -> ThreadConnections:
        assert self.peer.thread_connections is not None
        return self.peer.thread_connections

    def block(self, function: Any, *args: Any, timeout: float | Unset = UNSET, **kwargs: Any) -> Any:
        """In a thread: the result on a connection, or that it takes the loop."""
        packed = self.agent.prepare(self.peer, function, args, kwargs)
        return self.calls.call(self.peer, function, packed, timeout)

    async def call(self, function: Any, *args: Any, **more: Any) -> Any:
        return await asyncio.to_thread(self.block, function, *args, **more)

    async def have_connection(self, *functions: Any) -> None:
        """The peer knows these functions, and there is a connection to it."""
        for function in (echo, *functions):
            await asyncio.to_thread(self.agent.prepare, self.peer, function, (), None)
        await until(lambda: self.peer.connection is not None)
        await self.call(echo)
        await until(lambda: self.peer.thread_connections is not None and bool(self.peer.thread_connections.free))


@asynccontextmanager
async def two(options: RpcOptions = QUIET, *functions: Any) -> AsyncIterator[tuple[Cluster, Threads]]:
    ways = {"unix": UnixTransport(), "tcp": TcpTransport()}
    async with cluster(2, options=options, transports=ways) as group:
        await group[0].rpc_sync("worker1", echo)
        threads = Threads(group)
        await threads.have_connection(echo_in_thread, hold, hold_in_thread, *functions)
        yield group, threads
        await assert_nothing_left(group)


def links_of(group: Cluster) -> list[Any]:
    """The connections that worker1 knows of."""
    return [link for link in group[1].agent.connector.links if link.is_of_thread]


async def test_connections_to_one_peer_share_a_poll_that_does_not_keep_the_loops_connection():
    async with two() as (_, threads):
        pool = threads.connections
        pool.open_another(pool.main)
        await until(lambda: len(pool.all) == 2)
        first, second = pool.all
        assert first.poll is not None
        assert first.poll is second.poll
        assert pool._is_peer_elsewhere() is pool.main.is_peer_elsewhere
        pool.end(lambda name: WorkerLostError(name, "worker1"))
        assert not pool._is_peer_elsewhere()


# -- what a call is on a connection


@pytest.mark.parametrize("listen", ["unix://", "tcp://127.0.0.1:0"])
@pytest.mark.parametrize("function", [echo, echo_in_thread])
async def test_results_are_those_of_any_call(listen: str, function: Any):
    async with two(QUIET.replace(listen=(listen,), secret=b"told to both")) as (group, threads):
        before = threads.connections.calls_made
        assert await threads.call(function) is None
        for value in (1, "text", b"bytes", [1, {"a": (2, None)}], {1: 2.5}, 1 << 70, "x" * 30_000):
            assert await threads.call(function, value) == value
            assert await threads.call(function, value=value) == value
        for tensor in (torch.arange(6.0).reshape(2, 3), torch.ones(2, requires_grad=True), torch.tensor(3)):
            assert torch.equal(await threads.call(function, tensor), tensor)
            assert torch.equal((await threads.call(function, [tensor, 1]))[0], tensor)
        assert threads.connections.calls_made - before == 21
        assert group[0].statistics()["peers"]["worker1"]["thread_connections"] == 1
        assert len(links_of(group)) == 1
        assert await group[0].rpc_sync("worker1", function, args=(2,)) == 2


def fail(text: str) -> None:
    raise LookupError(text)


async def test_failures_are_those_of_any_call():
    async with two(QUIET, fail) as (group, threads):
        with pytest.raises(LookupError, match="no luck") as on_line:
            await threads.call(fail, "no luck")
        with pytest.raises(LookupError, match="no luck") as on_loop:
            await group[0].rpc_sync("worker1", fail, args=("no luck",))
        assert str(on_line.value.__cause__) == str(on_loop.value.__cause__)
        assert await threads.call(echo, 1) == 1


class Unreadable:
    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ZeroDivisionError("not here")


def make_unreadable() -> Any:
    return Unreadable()


async def test_a_result_that_cannot_be_built_is_told_of_as_ever():
    async with two(QUIET, make_unreadable) as (group, threads):
        with pytest.raises(SerializationError) as on_line:
            await threads.call(make_unreadable)
        with pytest.raises(SerializationError) as on_loop:
            await group[0].rpc_sync("worker1", make_unreadable)
        assert str(on_line.value) == str(on_loop.value)
        assert isinstance(on_line.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("switch", [torch.no_grad, torch.inference_mode])
async def test_what_a_thread_has_switched_off_does_not_touch_its_results(switch: Callable[[], Any]):
    async with two() as (_, threads):
        tensor = torch.ones(3, requires_grad=True)

        def block() -> Any:
            with switch():
                found = threads.block(echo, torch.ones(3)), threads.block(echo, [tensor])
                assert not torch.is_grad_enabled()
                return found

        alone, within = await asyncio.to_thread(block)
        assert not alone.is_inference()
        assert not within[0].is_inference()
        assert within[0].requires_grad


async def test_large_results_come_on_a_thread_connection_once_and_then_by_the_loop():
    async with two(QUIET.replace(shared_memory_from_bytes=100_000), zeros) as (_, threads):
        for size in (5_000, 20_000):
            assert (await threads.call(zeros, size)).shape == (size,)
        assert (await threads.call(zeros, 50_000)).shape == (50_000,)
        assert await threads.call(zeros, 1) is TAKES_LOOP


def zeros(size: int) -> torch.Tensor:
    return torch.zeros(size)


# -- what takes the loop


async def test_what_is_not_plain_takes_the_loop():
    async with two() as (group, threads):
        made = threads.connections.calls_made
        rref = group[0].remote("worker1", list)
        await rref.to_here()
        for args in ((torch.zeros(100_000),), ("x" * 100_000,), (lambda: 1,), (rref,)):
            assert await threads.call(echo, *args) is TAKES_LOOP or args[0].__class__.__name__ == "function"
        assert await threads.call(lambda: 1) is TAKES_LOOP
        for timeout in (-2.0, "soon", float("nan"), 1e12, True):
            assert await threads.call(echo, timeout=timeout) is TAKES_LOOP
        threads.calls.is_on = False
        assert await threads.call(echo) is TAKES_LOOP
        assert threads.connections.calls_made <= made + 1
        del rref


async def test_calls_of_handlers_take_the_loop():
    async with two(QUIET, block_in_handler) as (group, threads):
        _threads.append(threads)
        try:
            assert await group[1].rpc_sync("worker0", block_in_handler) == "takes the loop"
        finally:
            _threads.clear()


_threads: list[Threads] = []


def block_in_handler() -> str:
    return "takes the loop" if _threads[0].block(echo) is TAKES_LOOP else "took a connection"


async def test_calls_that_are_observed_take_the_loop():
    async with two() as (_, threads):
        observer = Observer()
        threads.agent.observe(observer)
        assert await threads.call(echo) is TAKES_LOOP
        threads.agent.unobserve(observer)
        assert await threads.call(echo, 1) == 1


@pytest.mark.parametrize("change", [{"max_calls_in_flight": 5}, {"allow": "exported"}])
async def test_some_workers_have_no_thread_connections(change: dict[str, Any]):
    ways = {"unix": UnixTransport()}
    async with cluster(2, options=QUIET.replace(**change), transports=ways) as group:
        assert not BlockingCalls(group[0].agent).is_on


async def test_a_worker_has_no_thread_connection_to_itself_nor_to_one_of_its_process_alone():
    async with cluster(2) as group:
        await group[0].rpc_sync("worker1", echo)
        await group[0].rpc_sync("worker0", echo)
        for name in ("worker0", "worker1"):
            threads = Threads(group)
            threads.peer = threads.agent.known_peer(name)
            assert await threads.call(echo) is TAKES_LOOP
            await until(lambda threads=threads: threads.peer.thread_connections is not None)  # type: ignore[misc]
            await until(lambda threads=threads: threads.connections._opening is None)  # type: ignore[misc]
            assert await threads.call(echo) is TAKES_LOOP
            assert len(threads.connections.all) == 0


# -- deadlines


@pytest.mark.parametrize("are_told", [True, False])
async def test_a_deadline_ends_a_call_and_not_the_thread_connection(stage: Stage, are_told: bool):
    async with two(QUIET.replace(timeouts_travel=are_told)) as (group, threads):
        # a callee that is told may be first to say so
        with pytest.raises(RpcTimeoutError, match=r"hold (was sent to|on) worker 'worker1'"):
            await threads.call(hold, timeout=0.05)
        if are_told:
            await stage.wait_until("held cancelled")
        else:
            assert threads.connections.free[-1].owed
            assert not stage.was_reached("held cancelled")
            stage.open()
        for number in range(3):
            assert await threads.call(echo, number, timeout=20) == number
        await until(lambda: threads.connections.free[-1].is_sound() and not threads.connections.free[-1].owed)
        assert len(threads.connections.all) == 1
        assert len(links_of(group)) == 1
        if not are_told:
            await stage.wait_until("held ended")


async def test_a_thread_that_signals_keep_from_noticing_is_woken_when_its_time_is_up(stage: Stage):
    async with two() as (_, threads):
        call = asyncio.ensure_future(threads.call(hold, timeout=500))
        await stage.wait_until("held begun")
        threads.connections._look_after()
        (connection,) = threads.connections.under_way
        connection.due_at = 1e-3  # long ago, however short the time since this machine started
        threads.connections._look_after()
        with pytest.raises(RpcTimeoutError, match="hold was sent to worker 'worker1' and did not end within its"):
            await call
        await until(lambda: not threads.connections.all)
        await threads.have_connection()
        assert await threads.call(echo, 1) == 1


async def test_a_callee_that_cancels_is_heard(stage: Stage):
    async with two() as (group, threads):
        call = asyncio.ensure_future(threads.call(hold))
        await stage.wait_until("held begun")
        ((_, _, left_s),) = threads.peer.calls_of_threads()
        assert left_s is not None
        assert 0 < left_s <= QUIET.rpc_timeout
        for link in links_of(group):
            link.cancel_all()
        with pytest.raises(CallCancelledError):
            await call


# -- the end of a connection, and of those it leads to


async def test_loss_of_a_thread_connection_ends_its_call_and_harms_nobody_else(stage: Stage):
    async with two() as (group, threads):
        call = asyncio.ensure_future(threads.call(hold_in_thread, "one"))
        beside = group[0].rpc_async("worker1", hold, args=("other",))
        await stage.wait_until("one begun", "other begun")
        for link in links_of(group):
            link.connection.abort(WireError("for a test"))
        with pytest.raises(WorkerLostError, match=r"'worker1' was lost: .*\(hold_in_thread may have run\)"):
            await call
        stage.open()
        await beside
        await assert_both_alive(group)
        assert group[0].statistics()["peers"]["worker1"]["connects"] == 1
        await threads.have_connection()
        assert await threads.call(echo, 2) == 2


async def test_a_connection_that_was_closed_while_idle_is_replaced_and_no_call_is_lost():
    async with two() as (group, threads):
        for link in links_of(group):
            link.connection.close("not needed")
        await until(lambda: not threads.connections.free[-1].is_sound())
        threads.connections.free[-1].used_at -= 10
        assert await threads.call(echo, 1) is TAKES_LOOP
        await until(lambda: not threads.connections.all)
        await threads.have_connection()
        assert await threads.call(echo, 1) == 1
        await until(lambda: len(links_of(group)) == 1)


async def test_loss_of_the_peer_ends_calls_on_thread_connections(stage: Stage):
    async with two() as (group, threads):
        call = asyncio.ensure_future(threads.call(hold, timeout=0))
        await stage.wait_until("held begun")
        main = threads.peer.connection
        assert main is not None
        main.abort(WireError("it has not been heard of"))
        with pytest.raises(WorkerLostError, match=r"'worker1' was lost: it has not been heard of \(hold may have run"):
            await call
        await stage.wait_until("held cancelled")
        await until(lambda: not links_of(group))
        assert len(threads.connections.all) == 0
        await assert_both_alive(group)
        await threads.have_connection()
        assert await threads.call(echo, 3) == 3


async def test_a_peer_that_leaves_says_so(stage: Stage):
    async with two() as (group, threads):
        call = asyncio.ensure_future(threads.call(hold, timeout=0))
        await stage.wait_until("held begun")
        await group[1].shutdown(graceful=False)
        with pytest.raises(WorkerLostError, match=r"worker 'worker1' has left: it was shut down"):
            await call
        await until(lambda: not threads.connections.all)
        assert await threads.call(echo) is TAKES_LOOP
        await group[0].shutdown(graceful=False)


async def test_shutdown_ends_calls_under_way_and_closes_thread_connections(stage: Stage):
    async with two() as (group, threads):
        call = asyncio.ensure_future(threads.call(hold, timeout=0))
        await stage.wait_until("held begun")
        assert group[0].statistics()["peers"]["worker1"]["calls_in_flight"] == 1
        assert not group[0].agent.is_quiet()
        ((_, name, left_s),) = threads.peer.calls_of_threads()
        assert (name, left_s) == ("hold", None)
        await group[0].shutdown(graceful=False)
        with pytest.raises(ShutdownError, match="this worker was shut down before hold ended"):
            await call
        assert await threads.call(echo) is TAKES_LOOP
        await stage.wait_until("held cancelled")
        await until(lambda: not links_of(group))
        await group[1].shutdown(graceful=False)


async def test_bad_bytes_on_a_thread_connection_end_it_and_nothing_else(caplog: pytest.LogCaptureFixture):
    async with two() as (group, threads):
        (link,) = links_of(group)
        link.connection._write(b"\xff" * 64)
        with pytest.raises(WorkerLostError, match=r"'worker1' was lost: .*\(echo may have run\)"):
            await threads.call(echo)
        await until(lambda: not links_of(group))
        await threads.have_connection()
        assert await threads.call(echo, 1) == 1
        assert "a connection of a thread to worker worker1 was closed" in caplog.text
        await assert_both_alive(group)


@pytest.mark.parametrize("type_", [MessageType.REPLY, MessageType.INSPECT, MessageType.RREF_FETCH])
async def test_a_thread_connection_may_bring_calls_alone(type_: MessageType, caplog: pytest.LogCaptureFixture):
    async with two() as (group, threads):
        threads.connections.free[-1].send(frame(type_, 0, 1, 1, 0, b"x"))
        await until(lambda: not links_of(group))
        assert f"the connection of a thread brought {type_.name}" in caplog.text
        await assert_both_alive(group)


async def test_idle_thread_connections_are_closed(monkeypatch: pytest.MonkeyPatch, stage: Stage):
    async with two(QUIET.replace(timeouts_travel=False)) as (group, threads):
        assert await threads.call(echo, 1) == 1
        threads.connections._look_after()
        assert len(threads.connections.all) == 1
        with pytest.raises(RpcTimeoutError):
            await threads.call(hold, timeout=0.01)
        monkeypatch.setattr(pool_module, "IDLE_S", 0.0)
        threads.connections._look_after()
        assert len(threads.connections.all) == 1, "its peer would take it for a sign that nobody wants the answer"
        stage.open()
        await until(lambda: threads.connections.free[-1].is_sound() and not threads.connections.free[-1].owed)
        made = threads.connections.calls_made
        threads.connections._look_after()
        assert len(threads.connections.all) == 0
        assert threads.connections.calls_made == made
        await until(lambda: not links_of(group))


async def test_a_connection_that_is_owed_many_answers_is_set_aside(monkeypatch: pytest.MonkeyPatch, stage: Stage):
    monkeypatch.setattr(blocking_module, "MAX_OWED", 2)
    monkeypatch.setattr(pool_module, "MAX_OWED", 2)
    async with two(QUIET.replace(timeouts_travel=False)) as (_, threads):
        (connection,) = threads.connections.free
        for _ in range(2):
            assert threads.connections.free == [connection]
            with pytest.raises(RpcTimeoutError):
                await threads.call(hold, timeout=0.01)
        assert threads.connections.aside == [connection]
        assert await threads.call(echo) is TAKES_LOOP
        await until(lambda: len(threads.connections.free) == 1)
        assert await threads.call(echo, 1) == 1
        threads.connections._look_after()
        assert threads.connections.aside == [connection]
        stage.open()
        await until(lambda: connection.is_sound() and not connection.owed)
        threads.connections._look_after()
        assert connection in threads.connections.free
        assert len(threads.connections.all) == 2


@pytest.mark.parametrize("how", ["end", "loss"])
async def test_a_connection_that_was_set_aside_is_closed_in_the_end(
    how: str, monkeypatch: pytest.MonkeyPatch, stage: Stage
):
    monkeypatch.setattr(blocking_module, "MAX_OWED", 1)
    async with two(QUIET.replace(timeouts_travel=False)) as (group, threads):
        (connection,) = threads.connections.free
        with pytest.raises(RpcTimeoutError):
            await threads.call(hold, timeout=0.01)
        assert threads.connections.aside == [connection]
        if how == "loss":
            for link in links_of(group):
                link.connection.abort()
            await until(lambda: not links_of(group))
            threads.connections._look_after()
            assert len(threads.connections.all) == 0
        else:
            threads.connections.end(WorkerLostError)
        assert not threads.connections.aside
        assert connection._socket.fileno() == -1
        stage.open()


async def test_a_connection_that_an_interrupted_thread_has_lost_is_closed(monkeypatch: pytest.MonkeyPatch):
    async with two() as (group, threads):
        lost = threads.connections.free.pop()
        threads.connections._look_after()
        assert len(threads.connections.all) == 1, "a thread may be about to use it"
        monkeypatch.setattr(pool_module, "IDLE_S", 0.0)
        lost.calling = echo
        threads.connections._look_after()
        assert len(threads.connections.all) == 1
        lost.calling = None
        threads.connections._look_after()
        assert len(threads.connections.all) == 0
        await until(lambda: not links_of(group))
        with pytest.raises(NotSentError):
            lost.request(b"", 1, 0.0)


@pytest.mark.parametrize("step", ["send", "close"])
async def test_a_thread_that_is_interrupted_twice_leaves_no_call_under_way(step: str, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    async with two() as (_, threads):
        (connection,) = threads.connections.free
        error = TimeoutError if step == "send" else KeyboardInterrupt
        with monkeypatch.context() as patched:
            patched.setattr(connection, "request", lambda *_: _raise(error))
            patched.setattr(connection, step, interrupt)
            found = await asyncio.to_thread(_caught, threads.block, echo)
        assert isinstance(found, KeyboardInterrupt)
        assert not threads.connections.under_way
        connection.close()
        threads.connections.forget(connection)


async def test_an_interrupt_while_a_result_is_built_is_one():
    async with two(QUIET, make_interrupting, make_interrupting_tensor) as (_, threads):
        for function in (make_interrupting, make_interrupting_tensor):
            assert isinstance(await asyncio.to_thread(_caught, threads.block, function), KeyboardInterrupt)
        assert await threads.call(echo, 1) == 1


class Interrupting:
    """Its unpickling is interrupted."""

    def __reduce__(self) -> Any:
        return _raise, (KeyboardInterrupt,)


def make_interrupting() -> Any:
    return Interrupting()


def make_interrupting_tensor() -> Any:
    return [torch.ones(3), Interrupting()]


def _raise(error: type[BaseException]) -> None:
    raise error


def _caught(call: Callable[..., Any], *args: Any) -> BaseException | None:
    try:
        call(*args)
    except BaseException as error:  # noqa: BLE001 - the test looks at it
        return error
    return None


# -- who may have how many


async def test_many_threads_share_few_thread_connections():
    async with two() as (group, threads):
        found: list[int] = []

        def work(number: int) -> None:
            for each in range(30):
                result = threads.block(echo, number * 100 + each)
                if result is not TAKES_LOOP:
                    assert result == number * 100 + each
                    found.append(result)

        made = threads.connections.calls_made
        await asyncio.gather(*(asyncio.to_thread(work, number) for number in range(8)))
        assert found
        assert len(set(found)) == len(found)
        assert threads.connections.calls_made - made == len(found)
        assert 1 <= len(threads.connections.all) <= threads.connections.limit
        await until(lambda: not threads.connections.under_way)
        await until(lambda: len(links_of(group)) == len(threads.connections.all))


async def test_a_peer_may_have_so_many_thread_connections_and_no_more():
    async with two() as (group, threads):
        opened = [await threads.calls.connect(threads.peer) for _ in range(MAX_THREADS - 1)]
        await until(lambda: len(links_of(group)) == MAX_THREADS)
        with pytest.raises(WireError, match="has 64 connections of threads already"):
            await threads.calls.connect(threads.peer)
        for connection in opened:
            connection.close()
        await until(lambda: len(links_of(group)) == 1)


async def test_thread_connections_take_their_share_of_the_requests_that_a_peer_may_have_running():
    async with two(QUIET.replace(max_handlers_per_peer=4 * THREAD_HANDLERS)) as (group, threads):
        (main,) = [link for link in group[1].agent.connector.links if not link.is_of_thread]
        another = await threads.calls.connect(threads.peer)
        await until(lambda: len(links_of(group)) == 2)
        assert [link.limit for link in links_of(group)] == [THREAD_HANDLERS] * 2
        assert main.limit == 2 * THREAD_HANDLERS
        with pytest.raises(WireError, match="may not have so many requests running"):
            await threads.calls.connect(threads.peer)
        another.close()
        await until(lambda: main.limit == 3 * THREAD_HANDLERS)
        main.running |= dict.fromkeys(range(-2 * THREAD_HANDLERS - 1, 0))  # type: ignore[arg-type]
        with pytest.raises(WireError, match="may not have so many requests running"):
            await threads.calls.connect(threads.peer)
        main.running.clear()


async def test_requests_that_wait_begin_when_a_thread_connection_gives_its_share_back(stage: Stage):
    async with two(QUIET.replace(max_handlers_per_peer=4 * THREAD_HANDLERS, heartbeat_interval=0)) as (group, threads):
        (main,) = [link for link in group[1].agent.connector.links if not link.is_of_thread]
        another = await threads.calls.connect(threads.peer)
        await until(lambda: len(links_of(group)) == 2)
        main.set_limit(1)
        held = group[0].rpc_async("worker1", hold)
        await stage.wait_until("held begun")
        waiting = group[0].rpc_async("worker1", echo, args=("waits",))
        await until(lambda: len(main.waiting) == 1)
        another.close()
        async with asyncio.timeout(5):
            assert await waiting == "waits"
        assert not held.done()
        stage.open()
        await held


async def test_few_requests_at_once_are_few_with_thread_connections_too():
    ways = {"unix": UnixTransport()}
    async with cluster(2, options=QUIET.replace(max_handlers_per_peer=1), transports=ways) as group:
        await group[0].rpc_sync("worker1", echo)
        threads = Threads(group)
        assert await threads.call(echo) is TAKES_LOOP
        await until(
            lambda: (
                threads.peer.thread_connections is not None
                and threads.connections.is_asked_for
                and not threads.connections.all
            )
        )
        with pytest.raises(WireError, match="may not have so many requests running"):
            await threads.calls.connect(threads.peer)
        assert not links_of(group)


async def test_a_thread_connection_needs_the_connection_that_it_belongs_to():
    async with two() as (group, threads):
        main = threads.peer.connection
        threads.peer.connection = None
        with pytest.raises(WireError, match="there is no connection to worker 'worker1'"):
            await threads.calls.connect(threads.peer)
        threads.peer.connection = main
        there = group[1].agent.known_peer("worker0")
        main_there, there.connection = there.connection, None
        with pytest.raises(WireError, match="'worker0' has no connection that this one could belong to"):
            await threads.calls.connect(threads.peer)
        there.connection = main_there


async def test_a_thread_connection_is_not_asked_for_signs_of_life():
    options = QUIET.replace(heartbeat_interval=0.02, heartbeat_timeout=5.0)
    async with two(options) as (group, threads):
        (link,) = links_of(group)
        frames_sent = link.connection.frames_sent
        pings = group[1].agent.heartbeat.pings_sent
        await until(lambda: group[1].agent.heartbeat.pings_sent > pings + 8)
        assert link.connection.is_open
        assert link.connection.frames_sent == frames_sent
        assert await threads.call(echo, 1) == 1


async def test_the_system_looks_after_a_thread_connection_that_is_silent():
    async with two(QUIET.replace(listen=("tcp://127.0.0.1:0",))) as (_, threads):
        (connection,) = threads.connections.free
        assert connection._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


async def test_a_child_of_a_fork_leaves_the_thread_connections_to_its_parent():
    async with two() as (_, threads):
        connection = threads.connections.free[-1]
        near, far = socket.socketpair()
        copy = ThreadConnections("worker1", threads.agent.loop, lambda: asyncio.sleep(0), 2)  # type: ignore[arg-type,return-value]
        with near, far:
            copy._all = {type(connection)(near, connection._protocol, "unix:///there")}
            copy.free = list(copy._all)
            copy.abandon()
            assert not copy.free
            assert not copy.all
            assert near.fileno() == -1
            far.setblocking(False)
            assert far.recv(100) == b""  # no word of it was said
        assert await threads.call(echo, 1) == 1


# -- who counts


class Heard(Meter):
    def __init__(self) -> None:
        self.calls: list[tuple[str, str, bool]] = []

    def call_ended(self, peer: str, function: Any, duration_ns: int, error: BaseException | None) -> None:
        assert duration_ns > 0
        self.calls.append((peer, function.__name__, error is None))

    def handler_ended(self, caller: str, function: str, duration_ns: int) -> None: ...
    def handler_failed(self, caller: str, function: str, error: BaseException) -> None: ...


async def test_meters_hear_of_calls_on_thread_connections():
    async with two(QUIET, fail) as (group, threads):
        meter = Heard()
        threads.agent.set_meter(meter)
        made = group[0].agent.calls_made
        assert await threads.call(echo, 1) == 1
        with pytest.raises(LookupError):
            await threads.call(fail, "x")
        assert await threads.call(lambda: 1) is TAKES_LOOP
        assert group[0].agent.calls_made == made + 2
        await until(lambda: len(meter.calls) == 2)
        assert meter.calls == [("worker1", "echo", True), ("worker1", "fail", False)]
        threads.agent.set_meter(None)


async def test_both_sides_count_the_same_calls():
    async with two() as (group, threads):
        made, handled = group[0].agent.calls_made, group[1].agent.dispatcher.calls_handled
        for _ in range(5):
            await threads.call(echo_in_thread, "x" * 1000)
        assert group[0].agent.calls_made == made + 5
        await until(lambda: group[1].agent.dispatcher.calls_handled == handled + 5)
        for peer in (threads.peer, group[1].agent.known_peer("worker0")):
            _, beside = peer.connections()
            assert 5000 < beside.count_sent() < 7000
            assert 5000 < beside.bytes_received < 7000
        await asyncio.gather(*(worker.shutdown() for worker in group))
        assert all(worker.is_shut_down for worker in group)
