"""``arpc stack``: the dumps of several workers as one text."""

from __future__ import annotations

from arpc.console.stack import describe
from arpc.metrics.stacks import AwaitedCall, CallStack, HandlerStack, TaskStack, WorkerStack


def worker(name, *, handlers=(), calls=(), tasks=(), waiting=0, not_told=0):
    return WorkerStack(name, 0, 1, 0.0, list(handlers), list(calls), list(tasks), waiting, not_told)


def handler(id_, caller, function, *, awaits=None, kind="coroutine", age_s=None, left_s=None, frames=()):
    return HandlerStack(id_, caller, function, kind, age_s, left_s, list(frames), awaits)


def test_a_call_is_followed_to_its_end():
    text = list(
        describe(
            [
                worker(
                    "a",
                    tasks=[TaskStack("main", ["a.py:1 main"], AwaitedCall("b", 7, "ask"))],
                    calls=[CallStack(7, "b", "ask", "sent", 5.0)],
                ),
                worker(
                    "b",
                    handlers=[handler(7, "a", "ask", awaits=AwaitedCall("c", 9, "look"), age_s=1.0, left_s=5.0)],
                    calls=[CallStack(9, "c", "look", "sent", None)],
                ),
                worker("c", handlers=[handler(9, "b", "look", frames=["c.py:5 look"])]),
            ]
        )
    )
    assert text == [
        "a (process 1): 0 handlers, 1 calls, 1 tasks",
        "  task main",
        "    a.py:1 main",
        "    awaits ask on b",
        "      ask on b for a, for 1 s, 5 s left",
        "        awaits look on c",
        "          look on c for b",
        "            c.py:5 look",
        "",
        "b (process 1): 1 handlers, 1 calls, 0 tasks",
        "",
        "c (process 1): 1 handlers, 0 calls, 0 tasks",
        "",
    ]


def test_what_nobody_waits_for_is_shown_all_the_same():
    text = list(
        describe(
            [
                worker("a", calls=[CallStack(1, "b", "ask", "waiting", None)], waiting=3, not_told=2),
                worker("b", handlers=[handler(5, "gone", "work", kind="queued")]),
            ]
        )
    )
    assert "  3 requests wait for their turn" in text
    assert "  call of ask to b, waiting to be sent" in text
    assert "    (no handler: it is on its way, or has just ended)" in text
    assert "  work on b for gone, waiting for a thread" in text
    assert "  and 2 more" in text


def test_two_that_wait_for_each_other_are_shown_once():
    """A deadlock, which is what such a dump is for."""
    text = list(
        describe(
            [
                worker(
                    "a",
                    handlers=[handler(2, "b", "pong", awaits=AwaitedCall("b", 1, "ping"))],
                    calls=[CallStack(1, "b", "ping", "sent", None)],
                ),
                worker(
                    "b",
                    handlers=[handler(1, "a", "ping", awaits=AwaitedCall("a", 2, "pong"))],
                    calls=[CallStack(2, "a", "pong", "sent", None)],
                ),
            ]
        )
    )
    assert len(text) < 40
