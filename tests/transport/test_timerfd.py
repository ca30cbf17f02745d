"""Timers that are not the loop's own: when they ring, and in which order."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import arpc
from arpc.errors import RpcTimeoutError
from arpc.testing import cluster
from arpc.transport.timerfd import Alarms, alarms_of
from tests.agent.stage import echo
from tests.descriptors import open_descriptors

uvloop = pytest.importorskip("uvloop")


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(debug=True, loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


def made() -> Alarms:
    alarms = alarms_of(asyncio.get_running_loop())
    if alarms is None:
        pytest.skip("this system has no timerfd")
    return alarms


def test_they_ring_in_order_and_never_early():
    async def main() -> None:
        loop, alarms = asyncio.get_running_loop(), made()
        began = loop.time()
        rang: list[tuple[float, bool]] = []
        last = asyncio.Event()
        for delay_s in (0.03, 0.01, 0.02, 0.0, -1.0):
            when = began + delay_s
            alarms.call_at(when, lambda when=when: rang.append((when, loop.time() >= when)))
        alarms.call_at(began + 0.04, last.set)
        await last.wait()
        assert rang == [(began + delay_s, True) for delay_s in (-1.0, 0.0, 0.01, 0.02, 0.03)]
        alarms.close()

    run(main)


def test_what_is_cancelled_does_not_ring():
    async def main() -> None:
        loop, alarms = asyncio.get_running_loop(), made()
        rang: list[str] = []
        last = asyncio.Event()
        now = loop.time()
        early = alarms.call_at(now + 0.01, lambda: rang.append("cancelled before its time"))
        together = alarms.call_at(now + 0.02, lambda: rang.append("cancelled by one of the same time"))
        alarms.call_at(now + 0.015, together.cancel)
        alarms.call_at(now + 0.03, last.set)
        early.cancel()
        early.cancel()
        await last.wait()
        assert not rang
        together.cancel()
        alarms.close()

    run(main)


def test_one_that_is_cancelled_by_another_of_the_same_moment():
    async def main() -> None:
        loop, alarms = asyncio.get_running_loop(), made()
        rang: list[str] = []
        last = asyncio.Event()
        now = loop.time()
        second = alarms.call_at(now - 1, lambda: rang.append("second"))
        alarms.call_at(now - 2, second.cancel)
        alarms.call_at(now + 0.01, last.set)
        await last.wait()
        assert not rang
        alarms.close()

    run(main)


def test_a_callback_may_set_the_next():
    async def main() -> None:
        loop, alarms = asyncio.get_running_loop(), made()
        left = 5
        last = asyncio.Event()

        def again() -> None:
            nonlocal left
            left -= 1
            if left:
                alarms.call_at(loop.time() + 0.002, again)
            else:
                last.set()

        alarms.call_at(loop.time(), again)
        far = alarms.call_at(loop.time() + 3600, last.set)
        await last.wait()
        assert not left
        far.cancel()
        alarms.close()

    run(main)


@pytest.mark.parametrize("never", [1e19, 1e300, float("inf")])
def test_one_may_be_set_for_a_time_that_never_comes(never: float):
    async def main() -> None:
        loop, alarms = asyncio.get_running_loop(), made()
        last = asyncio.Event()
        far = alarms.call_at(never, last.set)
        alarms.call_at(loop.time(), last.set)
        await last.wait()
        far.cancel()
        alarms.close()

    run(main)


def test_an_interrupt_does_not_keep_the_others_from_ringing():
    def interrupt() -> None:
        raise KeyboardInterrupt

    loop = uvloop.new_event_loop()
    try:
        alarms = alarms_of(loop)
        if alarms is None:
            pytest.skip("this system has no timerfd")
        last = asyncio.Event()
        alarms.call_at(loop.time() - 1, interrupt)
        alarms.call_at(loop.time(), last.set)
        with pytest.raises(KeyboardInterrupt):
            loop.run_forever()
        loop.run_until_complete(last.wait())
        alarms.close()
    finally:
        loop.close()


def test_one_that_fails_does_not_keep_the_others_from_ringing():
    async def main() -> None:
        loop, alarms = asyncio.get_running_loop(), made()
        failures: list[Any] = []
        loop.set_exception_handler(lambda _, details: failures.append(details["exception"]))
        last = asyncio.Event()

        def fail() -> None:
            raise ValueError("on purpose")

        alarms.call_at(loop.time() - 1, fail)
        alarms.call_at(loop.time() - 0.5, last.set)
        await last.wait()
        assert [str(failure) for failure in failures] == ["on purpose"]
        alarms.close()

    run(main)


def test_what_has_come_by_then_is_read_first():
    """A loop that was busy finds an answer and a deadline at once: the answer was not late."""

    async def main() -> None:
        loop, alarms = asyncio.get_running_loop(), made()
        heard: list[str] = []
        last = asyncio.Event()
        near, far = socket.socketpair()
        with near, far:
            near.setblocking(False)
            loop.add_reader(near, lambda: heard.append("an answer") if near.recv(1) else None)
            await asyncio.sleep(0.01)

            def late() -> None:
                heard.append("a deadline")
                last.set()

            alarms.call_at(loop.time() - 1, late)
            far.send(b"!")
            await last.wait()
            loop.remove_reader(near)
        assert heard == ["an answer", "a deadline"]
        alarms.close()

    run(main)


def test_closing_forgets_them_all():
    async def main() -> None:
        loop, alarms = asyncio.get_running_loop(), made()
        descriptors = open_descriptors()
        again = made()
        rang: list[str] = []
        again.call_at(loop.time() + 0.01, lambda: rang.append("closed"))
        again.close()
        again.close()
        again.call_at(loop.time(), lambda: rang.append("set after the end"))
        assert open_descriptors() == descriptors
        last = asyncio.Event()
        alarms.call_at(loop.time() + 0.03, last.set)
        await last.wait()
        assert not rang
        alarms.close()

    run(main)


def test_other_loops_have_timers_of_their_own():
    async def main() -> None:
        assert alarms_of(asyncio.get_running_loop()) is None

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(main())


def test_a_system_without_them(monkeypatch):
    async def main() -> None:
        monkeypatch.setattr("arpc.transport.timerfd.ctypes.CDLL", lambda *_, **__: object())
        assert alarms_of(asyncio.get_running_loop()) is None

    run(main)


def test_deadlines_and_heartbeats_of_a_worker():
    async def main() -> None:
        options = arpc.RpcOptions(heartbeat_interval=0.02, heartbeat_timeout=30, gc_freeze=False)
        async with cluster(2, options=options) as group:
            await group[0].rpc_sync("worker1", echo)
            with pytest.raises(RpcTimeoutError):
                await group[0].rpc_sync("worker1", wait_for_ever, timeout=0.05)
            while not group[0].agent.heartbeat.pings_sent:  # noqa: ASYNC110 - it waits for timers
                await asyncio.sleep(0.01)
            assert await group[0].rpc_sync("worker1", echo, ("alive",)) == "alive"

    run(main)
