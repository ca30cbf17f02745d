"""When a thread polls for its reply: with a clock and a socket that are not real."""

from __future__ import annotations

import threading

import pytest

from arpc.compat.blocking_client.reply_poll import ReplyPoll

STEP_S = 1e-6


class Stage:
    """A poll, and the time; each look at the clock takes a microsecond."""

    def __init__(self, longest_s: float = 1e-4, *, is_worth_it: bool = True) -> None:
        self.now = 100.0
        self.is_worth_it = is_worth_it
        self.yield_s = 0.0
        self.looks = 0
        self.poll = ReplyPoll(longest_s, lambda: self.is_worth_it, self.clock, self.give_way)

    def clock(self) -> float:
        self.now += STEP_S
        return self.now

    def give_way(self) -> None:
        self.now += self.yield_s

    def wait(self, reply_after: int | None) -> int:
        """Poll for a reply that is there after so many looks, or never; return the number of looks."""
        self.looks = 0

        def has_input(_: int) -> bool:
            self.looks += 1
            return reply_after is not None and self.looks > reply_after

        self.poll.wait(has_input)
        return self.looks


def test_a_poll_ends_with_the_reply():
    assert Stage().wait(10) == 11


def test_a_poll_ends_after_its_longest_time():
    stage = Stage(longest_s=20 * STEP_S)
    begun = stage.now
    assert stage.wait(None) > 5
    assert stage.now - begun < 30 * STEP_S


@pytest.mark.parametrize(("longest_s", "is_worth_it"), [(0.0, True), (1e-4, False)])
def test_there_is_no_poll_if_it_is_turned_off_or_cannot_help(longest_s, is_worth_it):
    assert Stage(longest_s, is_worth_it=is_worth_it).wait(0) == 0


def test_programs_that_want_the_cpu_get_it_while_a_thread_polls():
    stage = Stage()
    stage.yield_s = 0.0001
    assert stage.wait(10) == 2, "the time is over"
    stage.yield_s = 0.00001
    assert stage.wait(3) == 4, "the peer may be one of them"


def test_polls_that_find_nothing_stop_polling_for_longer_and_longer():
    stage = Stage(longest_s=5 * STEP_S)
    assert [stage.wait(None) > 0 for _ in range(4)] == [True, True, False, False]
    pauses = []
    for _ in range(6):
        begun = stage.now
        while not stage.wait(None):
            stage.now += 0.01
        pauses.append(round(stage.now - begun, 1))
    assert pauses == sorted(pauses)
    assert pauses[-1] == pauses[-2] > 0.15


def test_polls_that_find_their_reply_allow_for_one_in_eleven_that_does_not():
    stage = Stage(longest_s=5 * STEP_S)
    for _ in range(20):
        for _ in range(11):
            assert stage.wait(1) == 2
        assert stage.wait(None) > 0


def test_whether_the_peer_can_run_at_the_same_time_is_checked_again():
    stage = Stage(is_worth_it=False)
    assert stage.wait(1) == 0
    stage.is_worth_it = True
    assert stage.wait(1) == 0
    stage.now += 1
    assert stage.wait(1) == 2


def test_a_poll_ends_when_another_thread_calls():
    stage = Stage(longest_s=1.0)
    others = []

    def has_input(_: int) -> bool:
        if not others:
            others.append(threading.Thread(target=stage.wait, args=(0,)))
            others[0].start()
            others[0].join()
            assert stage.looks == 0, "the other thread does not poll"
        else:
            others.append(None)
        return False

    stage.poll.wait(has_input)
    assert len(others) == 1
    assert stage.wait(3) == 4, "alone again"
