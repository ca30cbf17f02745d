"""`Inbound`, built alone: requests that run are found by their id, and end with their deadlines."""

from __future__ import annotations

from contextvars import copy_context
from types import SimpleNamespace
from typing import Any

import pytest

from arpc.agent.client.deadlines import Deadlines
from arpc.agent.server.functions import Function
from arpc.agent.server.inbound import Inbound
from arpc.agent.server.run import Run
from arpc.ids import WorkerInfo


class Desk:
    """A connection, a clock and a timer that are moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.alarms: list[tuple[float, Any]] = []
        self.ended: list[int] = []
        self.refuses_to_end = False
        loop: Any = SimpleNamespace(time=self.time)
        connection: Any = SimpleNamespace(loop=loop)
        self.deadlines = Deadlines(loop, self.call_at)
        self.inbound = Inbound(
            connection, WorkerInfo("caller", 0), self.deadlines, max_handlers=100, main_by_value=False
        )
        self.replies = self

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Any) -> Any:
        alarm = when, callback
        self.alarms.append(alarm)
        return SimpleNamespace(cancel=lambda: self.alarms.remove(alarm) if alarm in self.alarms else None)

    def raised(self, run: Run, _error: BaseException) -> None:
        run.ended = True
        self.ended.append(run.id)

    def begin(self, id_: int, timeout_s: float) -> Run:
        host: Any = self
        run = Run(host, self.inbound, Function(len), id_, round(timeout_s * 1000), copy_context())
        self.inbound.register(run)
        return run

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.alarms and min(self.alarms, key=lambda alarm: alarm[0])[0] <= end:
            alarm = min(self.alarms, key=lambda alarm: alarm[0])
            self.alarms.remove(alarm)
            self.now = max(self.now, alarm[0])
            alarm[1]()
        self.now = end


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 3, 1)])
def test_each_ends_soon_after_its_own_deadline(desk, order):
    for number in order:
        desk.begin(number, number)
    for number in (1, 2, 3):
        desk.pass_time(0.9 if number == 1 else 0.85)
        assert desk.ended == [*range(1, number)], "not before"
        desk.pass_time(0.15)
        assert desk.ended == [*range(1, number + 1)]
    assert not desk.inbound.running


def test_those_that_have_ended_do_not_keep_others_from_expiring(desk):
    first, second = desk.begin(1, 1), desk.begin(2, 5)
    assert desk.inbound.claim(first)
    desk.pass_time(4.9)
    assert desk.ended == []
    desk.pass_time(0.3)
    assert desk.ended == [2]
    assert second.expired
    assert not first.expired


def test_one_without_a_timeout_never_expires(desk):
    run = desk.begin(1, 0)
    desk.begin(2, 1)
    desk.pass_time(1e6)
    assert desk.ended == [2]
    assert desk.inbound.running == {1: run}


def test_one_that_goes_on_is_cancelled_once(desk):
    run = desk.begin(1, 1)
    cancelled = []
    run.task = SimpleNamespace(cancel=lambda: cancelled.append(desk.now))
    desk.begin(2, 2)
    desk.begin(3, 3)
    desk.pass_time(10)
    assert desk.ended == [2, 3]
    assert len(cancelled) == 1
    assert list(desk.inbound.running) == [1]


def test_many_with_the_same_timeout_share_a_look(desk):
    for number in range(1000):
        desk.begin(number, 60)
        desk.pass_time(1e-4)
    assert len(desk.alarms) == 1
    desk.pass_time(61)
    assert len(desk.ended) == 1000
    assert not desk.alarms


def test_others_with_the_timeout_of_the_first_need_no_look_of_their_own(desk, monkeypatch):
    looks = []
    look_for_expired = desk.inbound._look_for_expired
    monkeypatch.setattr(desk.inbound, "_look_for_expired", lambda due: (looks.append(due), look_for_expired(due)))
    for number in range(100):
        desk.begin(number, 60)
        desk.pass_time(1e-3)
    assert len(looks) == 1


@pytest.mark.parametrize("first_s", [0.05, 1, 60])
@pytest.mark.parametrize("second_s", [0.05, 1, 60])
@pytest.mark.parametrize("between", [0.0, 0.3, 0.99])
def test_none_ends_late_because_of_another(desk, first_s, second_s, between):
    desk.begin(1, first_s)
    desk.pass_time(between * first_s)
    run = desk.begin(2, second_s)
    assert run.due is not None
    desk.pass_time(run.due + second_s / 64 + 0.01 - desk.now)
    assert 2 in desk.ended


def test_nothing_is_looked_for_after_the_end_of_the_connection(desk):
    desk.begin(1, 1)
    desk.inbound.cancel_all()
    assert desk.ended == [1]
    desk.pass_time(10)
    assert desk.ended == [1]


def test_a_function_that_was_never_sent_has_an_error(desk):
    message: Any = SimpleNamespace(id=5, arg=77)
    error = desk.inbound.function_of(message).error
    assert "call 5 of function 77, which was never sent" in str(error)


def test_a_short_deadline_does_not_wait_for_the_look_at_a_long_one(desk):
    desk.inbound.claim(desk.begin(1, 60))
    desk.pass_time(59.95)
    desk.begin(2, 0.1)
    desk.pass_time(0.15)
    assert desk.ended == [2]


def test_nothing_is_watched_after_the_end_of_the_connection(desk):
    desk.inbound.cancel_all()
    desk.begin(1, 60)
    assert not any(desk.deadlines._watchers.values())
