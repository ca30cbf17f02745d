"""What a worker knows of the others: every input in every state, and what listeners get of it."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from arpc import MemberEvent, MemberJoined, MemberLeft, MemberLost, MemberReturned, MemberSuspected, WorkerInfo
from arpc.group import roster as roster_module
from arpc.group.roster import Roster

A = WorkerInfo("a", 1)
A_AGAIN = WorkerInfo("a", 7)
B = WorkerInfo("b", 2)


def heard(roster: Roster) -> list[MemberEvent]:
    """All that happens from now on."""
    events: list[MemberEvent] = []
    roster.changed = events.append
    return events


def roster_with(*steps: str) -> Roster:
    """One that knows worker a, to which some things have happened."""
    roster = Roster()
    roster.seen(A, 10)
    for step in steps:
        tell(roster, step)
    return roster


def tell(roster: Roster, step: str) -> None:
    {
        "seen": lambda: roster.seen(A, 10),
        "seen new": lambda: roster.seen(A_AGAIN, 11),
        "suspected": lambda: roster.suspected(A, "silent"),
        "lost": lambda: roster.lost(A, "dead"),
        "left": lambda: roster.left(A),
    }[step]()


SUSPECTED = MemberSuspected(A, 10, "silent")
LOST = MemberLost(A, 10, "dead")
LEFT = MemberLeft(A, 10)
BACK = MemberReturned(A, 10, is_new=False)
REPLACED = MemberLost(A, 10, "another has come under its name")
NEW = MemberReturned(A_AGAIN, 11, is_new=True)


@pytest.mark.parametrize(
    ("before", "step", "events"),
    [
        ([], "seen", []),
        ([], "suspected", [SUSPECTED]),
        ([], "lost", [LOST]),
        ([], "left", [LEFT]),
        ([], "seen new", [REPLACED, NEW]),
        (["suspected"], "seen", [BACK]),
        (["suspected"], "suspected", []),
        (["suspected"], "lost", [LOST]),
        (["suspected"], "left", [LEFT]),
        (["suspected"], "seen new", [REPLACED, NEW]),
        (["lost"], "seen", [BACK]),
        (["lost"], "suspected", []),
        (["lost"], "lost", []),
        (["lost"], "left", []),
        (["lost"], "seen new", [NEW]),
        (["left"], "seen", [BACK]),
        (["left"], "suspected", []),
        (["left"], "lost", []),
        (["left"], "left", []),
        (["left"], "seen new", [NEW]),
        # what is still heard of a worker that another has followed is nothing to that one
        (["seen new"], "suspected", []),
        (["seen new"], "lost", []),
        (["seen new"], "left", []),
    ],
)
def test_what_is_told(before: list[str], step: str, events: list[MemberEvent]):
    roster = roster_with(*before)
    told = heard(roster)
    tell(roster, step)
    assert told == events


def test_a_stream_begins_with_those_who_are_there():
    roster = roster_with("suspected")
    roster.seen(B, 20)
    stream = roster.stream()
    assert list(stream._events) == [MemberJoined(A, 10), MemberJoined(B, 20)]
    roster.lost(A, "dead")
    assert stream._events[-1] == LOST
    assert list(roster.stream()._events) == [MemberJoined(B, 20)]


async def test_a_stream_waits_and_ends():
    roster = roster_with()
    stream = roster.stream()
    assert await anext(stream) == MemberJoined(A, 10)
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="another task is waiting"):
        await anext(stream)
    roster.lost(A, "dead")
    assert await waiting == LOST
    roster.seen(A, 10)
    roster.close()
    assert [event async for event in stream] == [BACK], "what has happened before the end is not lost"
    assert [event async for event in roster.stream()] == [MemberJoined(A, 10)]


async def test_a_cancelled_wait_loses_nothing():
    roster = roster_with()
    stream = roster.stream()
    await anext(stream)
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    roster.lost(A, "dead")  # the waiter is woken, and cancelled before it runs
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await anext(stream) == LOST


async def test_a_stream_that_is_closed_or_dropped_is_told_nothing():
    roster = roster_with()
    async with roster.stream() as stream:
        assert roster.has_open_streams
    assert not roster.has_open_streams
    assert [event async for event in stream] == []
    dropped = weakref.ref(roster.stream())
    gc.collect()
    assert dropped() is None
    assert not roster.has_open_streams


def test_who_is_slow_gets_what_is_still_true(monkeypatch):
    monkeypatch.setattr(roster_module, "_BUFFERED", 4)
    roster = roster_with()
    stream = roster.stream()
    for _ in range(10):
        roster.suspected(A, "silent")
        roster.seen(A, 10)
        assert len(stream._events) <= 4
    roster.seen(B, 20)
    roster.lost(A, "dead")
    assert len(stream._events) <= 4
    assert list(stream._events)[-2:] == [MemberJoined(B, 20), LOST]
    assert stream.dropped + len(stream._events) == 1 + 20 + 2


def test_those_who_are_gone_are_forgotten_in_the_end(monkeypatch):
    monkeypatch.setattr(roster_module, "REMEMBERED", 3)
    monkeypatch.setattr(roster_module, "REMEMBERED_S", 0.0)
    roster = Roster()
    for number in range(10):
        worker = WorkerInfo(f"w{number}", number)
        roster.seen(worker, number)
        roster.left(worker)
    assert roster.statistics() == {"present": 0, "suspected": 0, "lost": 0, "left": 3}
    roster.seen(WorkerInfo("w9", 9), 9)
    assert roster.statistics()["present"] == 1


async def test_no_worker_of_a_large_group_is_left_out(monkeypatch):
    monkeypatch.setattr(roster_module, "_BUFFERED", 4)
    roster = Roster()
    stream = roster.stream()
    workers = [WorkerInfo(f"worker{number}", number) for number in range(20)]
    for worker in workers:
        roster.seen(worker, 1)
    for _ in range(10):
        roster.suspected(workers[0], "silence")
        roster.seen(workers[0], 1)
    roster.close()
    assert {event.worker for event in [event async for event in stream]} == set(workers)
    assert stream.dropped
