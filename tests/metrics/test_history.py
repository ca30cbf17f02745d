"""A ring of seconds."""

from __future__ import annotations

from arpc.metrics.history import History


def history(seconds=4):
    return History(("calls",), ("in_flight",), seconds)


def test_totals_become_rates_and_levels_stay():
    kept = history()
    for calls, level in ((10, 1), (15, 2), (35, 0)):
        kept.sample({"calls": calls, "in_flight": level})
    assert kept.rows() == {"calls": [0, 5, 20], "in_flight": [1, 2, 0]}
    assert kept.last("calls") == 20


def test_a_second_that_took_longer_counts_as_such():
    kept = history()
    kept.sample({"calls": 0, "in_flight": 0})
    kept.sample({"calls": 30, "in_flight": 0}, elapsed_s=3.0)
    assert kept.last("calls") == 10


def test_only_the_last_seconds_are_kept_oldest_first():
    kept = history(3)
    for total in (0, 1, 3, 6, 10):
        kept.sample({"calls": total, "in_flight": total})
    assert kept.rows() == {"calls": [2, 3, 4], "in_flight": [3, 6, 10]}


def test_a_total_that_was_begun_anew_is_no_negative_rate():
    kept = history()
    kept.sample({"calls": 100, "in_flight": 0})
    kept.sample({"calls": 4, "in_flight": 0})
    assert kept.last("calls") == 4


def test_nothing_has_happened_before_the_first_second():
    assert history().rows() == {"calls": [], "in_flight": []}
    assert history().last("calls") == 0
