from __future__ import annotations

import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arpc.launch.life import (
    Decision,
    Ended,
    Failure,
    GroupLife,
    Kill,
    Outcome,
    Restart,
    SetAlarm,
    Start,
    Terminate,
    describe_exit,
    exit_status,
)

SUCCESS = Outcome()


def test_all_end_well():
    life = GroupLife(2)
    assert life.start() == [Start(0)]
    assert life.exited(1, 0) == []
    assert life.exited(0, 0) == [Ended(SUCCESS)]


def test_the_first_failure_ends_the_group():
    life = GroupLife(3, grace_s=5)
    life.start()
    assert life.exited(1, 3) == [Terminate((0, 2)), SetAlarm(1, 5)]
    assert life.is_ending
    assert life.exited(0, -15) == []  # as it was asked to
    assert life.exited(2, 1) == [Ended(Outcome(Failure(1, 3)))]


def test_who_does_not_end_in_time_is_killed():
    life = GroupLife(2)
    life.start()
    life.exited(0, 1)
    assert life.time_is_up(1) == [Kill((1,))]
    assert life.exited(1, -9) == [Ended(Outcome(Failure(0, 1)))]


def test_an_alarm_of_before_is_not_heard():
    life = GroupLife(2, max_restarts=1)
    life.start()
    assert life.exited(0, 1) == [Terminate((1,)), SetAlarm(1, 10.0)]
    assert life.exited(1, 0) == [Start(1)]
    assert life.time_is_up(1) == []


def test_a_failed_group_is_started_again_as_often_as_it_may():
    life = GroupLife(1, max_restarts=2)
    life.start()
    assert life.exited(0, 1) == [Start(1)]
    assert life.exited(0, 2) == [Start(2)]
    assert life.exited(0, 3) == [Ended(Outcome(Failure(0, 3)))]
    assert life.incarnation == 2


def test_a_worker_of_an_elastic_group_is_started_again_by_itself():
    life = GroupLife(3, max_restarts=2, grace_s=5, is_elastic=True)
    life.start()
    assert life.exited(2, -9) == [Restart(Failure(2, -9), 1)]
    assert life.exited(1, 1, lost_another=True) == [Restart(Failure(1, 1), 2)]
    assert life.alive == {0, 1, 2}
    assert life.exited(2, 3) == [Terminate((0, 1)), SetAlarm(1, 5)]  # no restart is left
    assert life.exited(0, 0) == []
    assert life.exited(1, 0) == [Ended(Outcome(Failure(2, 3)))]


def test_nobody_is_started_again_while_an_elastic_group_ends():
    life = GroupLife(2, max_restarts=5, is_elastic=True)
    life.start()
    life.interrupted(signal.SIGINT)
    assert life.exited(0, -15) == []
    assert life.exited(1, -15) == [Ended(Outcome(interrupted_by=signal.SIGINT))]


def test_a_group_that_ended_well_after_all_is_a_success():
    life = GroupLife(1, max_restarts=1)
    life.start()
    life.exited(0, 1)
    assert life.exited(0, 0) == [Ended(SUCCESS)]


def test_who_lost_another_worker_is_not_to_blame():
    life = GroupLife(3, blame_s=2, grace_s=5)
    life.start()
    assert life.exited(0, 1, lost_another=True) == [SetAlarm(1, 2)]
    assert not life.is_ending
    assert life.exited(1, 1, lost_another=True) == []
    assert life.exited(2, 7) == [Ended(Outcome(Failure(2, 7)))]


def test_the_one_to_blame_ends_the_group():
    life = GroupLife(3, grace_s=5)
    life.start()
    life.exited(0, 1, lost_another=True)
    assert life.exited(2, -11) == [Terminate((1,)), SetAlarm(2, 5)]
    assert life.exited(1, -15) == [Ended(Outcome(Failure(2, -11)))]


def test_who_lost_another_is_to_blame_if_nobody_else_is():
    life = GroupLife(2, grace_s=5)
    life.start()
    life.exited(0, 1, lost_another=True)
    assert life.time_is_up(1) == [Terminate((1,)), SetAlarm(2, 5)]
    assert life.exited(1, 3) == [Ended(Outcome(Failure(0, 1)))]


def test_the_last_worker_lost_another():
    life = GroupLife(1)
    life.start()
    assert life.exited(0, 1, lost_another=True) == [Ended(Outcome(Failure(0, 1)))]


def test_an_interrupt_ends_the_group_for_good():
    life = GroupLife(2, max_restarts=3, grace_s=5)
    life.start()
    assert life.interrupted(signal.SIGINT) == [Terminate((0, 1)), SetAlarm(1, 5)]
    assert life.exited(0, -15) == []
    assert life.exited(1, 1) == [Ended(Outcome(interrupted_by=signal.SIGINT))]
    assert life.interrupted(signal.SIGINT) == []


def test_a_second_interrupt_does_not_wait():
    life = GroupLife(2)
    life.start()
    life.interrupted(signal.SIGINT)
    assert life.interrupted(signal.SIGTERM) == [Kill((0, 1))]
    life.exited(0, -9)
    assert life.exited(1, -9) == [Ended(Outcome(interrupted_by=signal.SIGINT))]


def test_an_interrupt_while_a_failed_group_ends_keeps_it_from_starting_again():
    life = GroupLife(2, max_restarts=1, grace_s=5)
    life.start()
    life.exited(0, 1)
    assert life.interrupted(signal.SIGTERM) == [Terminate((1,)), SetAlarm(2, 5)]
    assert life.exited(1, -15) == [Ended(Outcome(interrupted_by=signal.SIGTERM))]


@pytest.mark.parametrize(("code", "status"), [(0, 0), (3, 3), (-9, 137), (-15, 143)])
def test_exit_status(code: int, status: int):
    assert exit_status(code) == status


def test_a_signal_without_a_name():
    assert describe_exit(-63) == "was killed by signal 63"


EVENTS = st.one_of(
    st.tuples(st.just("exit"), st.integers(0, 3), st.sampled_from([0, 1, -9]), st.booleans()),
    st.tuples(st.just("interrupt")),
    st.tuples(st.just("alarm")),
)


@settings(max_examples=300)
@given(st.integers(1, 4), st.integers(0, 2), st.booleans(), st.lists(EVENTS, max_size=60))
def test_whatever_happens_it_ends_once_and_knows_who_lives(
    size: int, max_restarts: int, is_elastic: bool, events: list[tuple]
):
    life = GroupLife(size, max_restarts=max_restarts, is_elastic=is_elastic)
    decisions: list[Decision] = life.start()
    alarm = 0
    starts = 0
    ended = False
    alive: set[int] = set()
    # at last everybody exits, whoever is still there
    ends = [("exit", rank, 0, False) for _ in range(max_restarts + 1) for rank in range(size)]
    for event in [None, *events, *ends]:
        if event is not None:
            if event[0] == "exit":
                if event[1] not in alive:
                    continue
                alive.discard(event[1])
                decisions = life.exited(event[1], event[2], lost_another=event[3])
            elif event[0] == "interrupt":
                decisions = life.interrupted(signal.SIGINT)
            else:
                decisions = life.time_is_up(alarm)
        for decision in decisions:
            assert not ended
            match decision:
                case Start(incarnation):
                    assert incarnation == starts
                    assert not alive
                    starts += 1
                    alive = set(range(size))
                case Restart(failure, incarnation):
                    assert incarnation == starts
                    assert failure.rank not in alive
                    starts += 1
                    alive.add(failure.rank)
                case Terminate(ranks) | Kill(ranks):
                    assert set(ranks) == alive
                    assert alive
                case SetAlarm(number, _):
                    assert number > alarm
                    alarm = number
                case Ended():
                    assert not alive
                    ended = True
        assert life.alive == alive
    assert ended
    assert starts <= max_restarts + 1
