"""Whether memory is flat."""

from __future__ import annotations

import pytest

from scripts.soak.memory import MIB, trend_of


def test_a_process_that_lived_shortly_has_no_trend():
    assert trend_of("a.1", []) is None
    assert trend_of("a.1", [(float(second), MIB) for second in range(30)]) is None


def test_a_short_life_is_not_judged():
    trend = trend_of("a.1", [(float(second), (100 + second) * MIB) for second in range(120)])
    assert trend is not None
    assert trend.slope == pytest.approx(MIB)
    assert trend.is_flat


def test_warming_up_is_no_growth():
    trend = trend_of("a.1", [(float(second), (200 + min(second, 90)) * MIB) for second in range(300)])
    assert trend is not None
    assert trend.is_flat
    assert trend.slope == pytest.approx(0.0)


def test_a_leak_is_found_in_noise():
    samples = [(float(second), (200 * MIB + 400_000 * second + second % 7 * 4 * MIB)) for second in range(300)]
    trend = trend_of("a.1", samples)
    assert trend is not None
    assert not trend.is_flat
    assert trend.slope == pytest.approx(400_000, rel=0.1)
    assert trend.per_thousand(20_000) == pytest.approx(1000 * trend.slope * trend.seconds / 20_000)


def test_large_results_that_come_and_go_are_no_growth():
    samples = [(float(second), 200 * MIB + (64 * MIB if second % 10 == 0 else 0)) for second in range(300)]
    trend = trend_of("a.1", samples)
    assert trend is not None
    assert trend.is_flat
