"""When a worker stays awake for the next message, and when it does not: events in, turns of a loop out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from arpc.testing.endpoints import turns_until
from arpc.transport import busy_poll as module
from arpc.transport.busy_poll import BusyPoll, can_run_at_once

LONGEST_S = 0.0002


class Handle:
    is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Loop:
    """Runs nothing by itself."""

    def __init__(self) -> None:
        self.ready: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.later: list[tuple[float, Callable[..., None], tuple[Any, ...], Handle]] = []

    def call_soon(self, callback: Callable[..., None], *args: Any, context: Any = None) -> None:
        self.ready.append((callback, args))

    def time(self) -> float:
        return 0.0

    def call_at(self, when: float, callback: Callable[..., None], *args: Any) -> Handle:
        handle = Handle()
        self.later.append((when, callback, args, handle))
        return handle

    def turn(self) -> bool:
        """One turn; False if it would have waited instead."""
        ready, self.ready = self.ready, []
        for callback, args in ready:
            callback(*args)
        return bool(ready)

    def consider(self) -> float:
        """What the timer does, and how long it had been set to."""
        delay_s, callback, args, handle = self.later.pop()
        assert not handle.is_cancelled
        callback(*args)
        return delay_s


class Connection:
    """One that can be told to stay awake."""

    def __init__(self, loop: Any, *, is_local: bool = True, process: int | None = None) -> None:
        self.loop = loop
        self.bytes_received = 0
        self.is_local = is_local
        self.peer_process = process
        self.busy_poll: BusyPoll | None = None

    def set_busy_poll(self, busy_poll: BusyPoll | None) -> None:
        self.busy_poll = busy_poll

    def read(self) -> None:
        self.bytes_received += 32
        if self.busy_poll is not None:
            self.busy_poll.received(self.loop)


class Pool:
    """Threads in any state."""

    is_asleep = True
    is_in_slow_job = False
    cpu_s = 0.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Scene:
    """A busy_poll over one connection, on a machine with some CPUs, whose others are this busy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.loop = Loop()
        self.cpus = {0, 1}
        self.peer_cpus = {0, 1}
        self.others_s = 0.0
        self.yields_s = 0.0
        monkeypatch.setattr(module, "_own_cpus", lambda: self.cpus)
        monkeypatch.setattr(module, "_others_s", lambda: self.others_s)
        monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: self.peer_cpus, raising=False)
        self.busy_poll = BusyPoll(LONGEST_S, self.clock, self._give_way)
        self.pool = Pool()
        self.busy_poll.pools = Pool(), self.pool
        self.connection = Connection(self.loop, process=1)

    def _give_way(self) -> None:
        self.clock.now += self.yields_s

    def join(self) -> Connection:
        self.busy_poll.join(self.connection)
        return self.connection

    def empty_polls(self) -> None:
        """Something comes in a conversation, and nothing after it."""
        self.talk()
        self.fall_asleep()

    def talk(self) -> None:
        """Something comes, and it is not the first."""
        self.connection.read()
        if not self.loop.ready:
            self.connection.read()

    def fall_asleep(self) -> None:
        while self.loop.turn():
            self.clock.now += 1.01 * LONGEST_S

    def considered(self, times: int = 1) -> float:
        delay_s = 0.0
        for _ in range(times):
            self.clock.now += 0.05
            delay_s = self.loop.consider()
        return delay_s


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_the_loop_does_not_wait_until_nothing_has_come_for_a_while(scene: Scene) -> None:
    scene.join()
    scene.talk()
    for _ in range(10):
        assert scene.loop.turn()
    scene.clock.now += 1.01 * LONGEST_S
    assert scene.loop.turn()
    assert not scene.loop.turn()
    assert scene.busy_poll.statistics() == {"polls": 1, "empty_polls": 1, "connections": 1}


def test_news_prolong_it(scene: Scene) -> None:
    connection = scene.join()
    scene.talk()
    for _ in range(20):
        scene.loop.turn()
        scene.clock.now += 0.9 * LONGEST_S
        connection.read()
    assert scene.loop.turn()
    assert (scene.busy_poll.polls, scene.busy_poll.empty_polls) == (1, 0)


def test_a_single_message_is_no_reason(scene: Scene) -> None:
    connection = scene.join()
    assert not scene.loop.turn()
    for _ in range(10):
        connection.read()
        assert not scene.loop.turn()
        scene.clock.now += 1.01 * module._TALK_S
    connection.read()
    connection.read()
    assert scene.loop.turn()


def test_one_chain_of_looks_at_a_time(scene: Scene) -> None:
    scene.join()
    scene.talk()
    scene.busy_poll._is_polling = False
    scene.talk()
    assert len(scene.loop.ready) == 1
    assert scene.loop.turn()
    assert len(scene.loop.ready) == 1


def test_polls_in_vain_become_rare(scene: Scene) -> None:
    scene.join()
    for _ in range(200):
        scene.empty_polls()
    assert scene.busy_poll.polls == module._FIRST_CREDIT
    # then a few at a time, after longer and longer pauses
    pauses_s = []
    for _ in range(20):
        pauses_s.append(scene.considered())
        before = scene.busy_poll.polls
        for _ in range(10):
            scene.empty_polls()
        assert scene.busy_poll.polls == before + module._FIRST_CREDIT
    assert pauses_s == sorted(pauses_s)
    assert pauses_s[-1] == module._LONGEST_PAUSE * module._CHECK_S


def test_success_brings_them_back(scene: Scene) -> None:
    connection = scene.join()
    for _ in range(200):
        scene.empty_polls()
    scene.considered()
    scene.talk()
    for _ in range(100):
        scene.loop.turn()
        connection.read()
    scene.fall_asleep()
    before = scene.busy_poll.polls
    for _ in range(30):
        scene.empty_polls()
    assert scene.busy_poll.polls == before + 30


def test_it_ends_for_long_when_another_program_takes_the_cpu(scene: Scene) -> None:
    scene.join()
    scene.talk()
    for _ in range(100):
        scene.loop.turn()
        scene.connection.read()
    scene.yields_s = 0.003
    for _ in range(20):
        scene.talk()
        while scene.loop.turn():
            pass
    assert scene.busy_poll.empty_polls == module._CREDIT // module._PRICE_OF_SHARING
    scene.yields_s = 0.0
    scene.talk()
    assert not scene.loop.turn()
    scene.considered()
    scene.talk()
    assert scene.loop.turn()


def test_it_ends_when_another_program_has_a_use_for_the_cpu(scene: Scene) -> None:
    scene.join()
    scene.yields_s = 1.01 * module._SHARED_S
    scene.talk()
    assert scene.loop.turn()
    assert not scene.loop.turn()
    assert scene.busy_poll.empty_polls == 1


def test_it_ends_while_threads_of_the_worker_are_busy(scene: Scene) -> None:
    connection = scene.join()
    scene.pool.is_asleep = False
    scene.pool.is_in_slow_job = True
    scene.talk()
    scene.loop.turn()
    assert not scene.loop.turn()
    assert scene.busy_poll.empty_polls == 0
    scene.pool.is_asleep = True
    scene.pool.is_in_slow_job = False
    connection.read()
    assert scene.loop.turn()
    assert scene.loop.turn()


def test_it_gives_way_to_threads_that_are_quick_and_goes_on(scene: Scene) -> None:
    connection = scene.join()
    scene.pool.is_asleep = False
    scene.yields_s = 0.9 * LONGEST_S  # they take it: that is no other program
    scene.talk()
    assert scene.loop.turn()
    scene.pool.is_asleep = True
    scene.yields_s = 0.0
    assert scene.loop.turn(), "the answer is out, and the next message may come"
    connection.read()
    assert scene.loop.turn()
    assert scene.loop.turn()
    assert (scene.busy_poll.polls, scene.busy_poll.empty_polls) == (1, 0)


def test_one_that_ends_while_a_quick_thread_is_at_work_was_not_in_vain(scene: Scene) -> None:
    scene.join()
    scene.pool.is_asleep = False
    for _ in range(20):
        scene.empty_polls()
        assert not scene.loop.ready
    assert (scene.busy_poll.polls, scene.busy_poll.empty_polls) == (20, 0)


def test_there_is_none_while_other_threads_are_busy(scene: Scene) -> None:
    connection = scene.join()
    scene.others_s += 0.02
    scene.considered()
    assert connection.busy_poll is None
    scene.considered()
    assert connection.busy_poll is scene.busy_poll
    # those of the worker's own are asked at each look
    scene.others_s += 0.04
    scene.pool.cpu_s += 0.04
    scene.considered()
    assert connection.busy_poll is scene.busy_poll


@pytest.mark.parametrize(
    ("own", "peers", "is_local", "process", "is_awake"),
    [
        ({0, 1}, {0, 1}, True, 1, True),
        ({0, 1}, {0}, True, None, True),
        ({0}, {0}, True, 1, False),
        ({0}, {1}, True, 1, True),
        ({0}, {0, 1}, True, 1, True),
        ({0}, {1}, True, None, False),
        ({0}, set(), False, None, True),
    ],
)
def test_both_on_one_cpu_never_stay_awake(
    scene: Scene, own: set[int], peers: set[int], is_local: bool, process: int | None, is_awake: bool
) -> None:
    scene.cpus, scene.peer_cpus = own, peers
    scene.connection = Connection(scene.loop, is_local=is_local, process=process)
    assert (scene.join().busy_poll is not None) is is_awake
    assert can_run_at_once(scene.connection) is is_awake


def test_a_process_that_is_gone_is_on_no_cpu(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: int) -> set[int]:
        raise ProcessLookupError

    scene.cpus = {0}
    monkeypatch.setattr(module.os, "sched_getaffinity", gone, raising=False)
    assert scene.join().busy_poll is None


def test_who_is_moved_to_the_same_cpu_is_noticed(scene: Scene) -> None:
    connection = scene.join()
    scene.cpus = scene.peer_cpus = {1}
    scene.considered()
    assert connection.busy_poll is None
    scene.peer_cpus = {0}
    scene.considered()
    assert connection.busy_poll is scene.busy_poll


def test_it_is_considered_seldom_when_nothing_comes_or_all_is_well(scene: Scene) -> None:
    scene.join()
    connection = scene.connection
    scene.considered()
    assert scene.loop.later[-1][0] == module._SELDOM_S
    scene.cpus = scene.peer_cpus = {0}
    connection.read()
    scene.considered()
    assert scene.loop.later[-1][0] == module._CHECK_S
    scene.considered(module._SILENT)
    assert scene.loop.later[-1][0] == module._SELDOM_S
    connection.read()
    scene.considered()
    assert scene.loop.later[-1][0] == module._CHECK_S


def test_who_is_moved_in_the_middle_of_a_conversation_is_noticed(scene: Scene) -> None:
    connection = scene.join()
    scene.talk()
    scene.cpus = scene.peer_cpus = {1}
    scene.clock.now += 1.01 * module._CHECK_S
    connection.read()
    scene.loop.turn()
    assert connection.busy_poll is None
    assert not scene.loop.turn()


def test_nothing_goes_on_without_connections(scene: Scene) -> None:
    connection = scene.join()
    scene.talk()
    scene.busy_poll.leave(connection)
    assert scene.loop.later[-1][-1].is_cancelled
    scene.loop.turn()
    assert not scene.loop.turn()
    scene.join()
    assert not scene.loop.later[-1][-1].is_cancelled


def test_close_ends_it(scene: Scene) -> None:
    connection = scene.join()
    scene.talk()
    scene.busy_poll.close()
    assert connection.busy_poll is None
    assert scene.loop.later[-1][-1].is_cancelled
    scene.loop.turn()
    assert not scene.loop.turn()


async def test_on_a_real_loop() -> None:
    """It lets others run, and ends."""
    busy_poll = BusyPoll(LONGEST_S)
    loop = asyncio.get_running_loop()
    turns = 0

    def count() -> None:
        nonlocal turns
        turns += 1
        if busy_poll._is_polling:
            loop.call_soon(count)

    busy_poll.received(loop)
    busy_poll.received(loop)
    count()
    await turns_until(lambda: not busy_poll._is_polling)
    assert turns > 0
    assert busy_poll.empty_polls == 1
