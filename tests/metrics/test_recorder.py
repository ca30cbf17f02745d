"""Series by peer and function."""

from __future__ import annotations

from arpc.metrics import recorder as module
from arpc.metrics.recorder import OTHER_FUNCTIONS, OTHER_PEERS, Recorder
from arpc.wire.messages import Inspect


def test_calls_and_handlers_are_kept_apart_by_peer_and_function():
    recorder = Recorder(0.0)
    recorder.call_ended("ps", max, 1_000_000, None)
    recorder.call_ended("ps", max, 2_000_000, ValueError())
    recorder.call_ended("logger", max, 1_000_000, None)
    recorder.handler_ended("ps", "pull", 5_000_000)
    recorder.handler_failed("ps", "pull", KeyError())
    assert {key: series.durations.count for key, series in recorder.calls.items()} == {
        ("ps", "max"): 2,
        ("logger", "max"): 1,
    }
    assert recorder.calls["ps", "max"].errors == {"ValueError": 1}
    assert recorder.handlers["ps", "pull"].errors == {"KeyError": 1}
    assert recorder.totals() == {"calls": 3.0, "handled": 1.0, "errors": 1.0}


def test_those_who_look_are_not_counted():
    recorder = Recorder(0.0)
    recorder.call_ended("ps", Inspect, 1, None)
    recorder.handler_ended("ps", "Inspect", 1)
    recorder.handler_failed("ps", "Inspect", ValueError())
    assert recorder.totals() == {"calls": 0.0, "handled": 0.0, "errors": 0.0}
    assert not recorder.calls
    assert not recorder.handlers


def test_functions_without_end_share_a_row_and_are_not_kept_alive(monkeypatch):
    monkeypatch.setattr(module, "_MAX_SERIES", 3)
    recorder = Recorder(0.0)
    for number in range(10):
        recorder.handler_ended("ps", f"made{number}", 1)
        recorder.call_ended("ps", lambda: None, 1, None)
    assert [function for _, function in recorder.handlers] == ["made0", "made1", "made2", OTHER_FUNCTIONS]
    assert recorder.handlers["ps", OTHER_FUNCTIONS].durations.count == 7
    assert not recorder._by_function


def test_peers_without_end_share_a_row(monkeypatch):
    monkeypatch.setattr(module, "_MAX_SERIES", 3)
    recorder = Recorder(0.0)
    for number in range(20):
        recorder.handler_ended(f"worker{number}", "add", 1)
        recorder.call_ended(f"worker{number}", print, 1, None)
    assert len(recorder.handlers) == len(recorder.calls) == 2 * 3 + 1
    assert recorder.handlers[OTHER_PEERS, OTHER_FUNCTIONS].durations.count == 20 - 2 * 3
    assert recorder.totals()["handled"] == 20


def test_a_function_that_cannot_be_hashed_is_counted_too():
    class Odd:
        __hash__ = None
        __qualname__ = "Odd"

        def __call__(self):
            """Nothing."""

    recorder = Recorder(0.0)
    recorder.call_ended("ps", Odd(), 1, None)
    assert list(recorder.calls) == [("ps", "Odd")]


def test_recent_is_the_last_ten_to_twenty_seconds():
    recorder = Recorder(0.0)

    def recent():
        counts, since = recorder.calls["ps", "max"].recent()
        return sum(counts.values()), since

    recorder.call_ended("ps", max, 1, None)
    assert recent() == (1, 0.0)
    recorder.tick(10.0)
    recorder.call_ended("ps", max, 1, None)
    assert recent() == (2, 0.0)
    recorder.tick(20.0)
    assert recent() == (1, 10.0)
    recorder.tick(25.0)  # not yet
    assert recent() == (1, 10.0)
    recorder.tick(30.0)
    assert recent() == (0, 20.0)
