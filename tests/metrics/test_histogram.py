"""Fixed buckets: where durations fall, and what is told of them."""

from __future__ import annotations

import doctest
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpc.metrics import histogram
from arpc.metrics.histogram import BUCKETS, Histogram, difference, merged, quantile, upper_bound_s

durations_ns = st.integers(min_value=0, max_value=10**12)


def counted(values):
    made = Histogram()
    for value in values:
        made.add(value)
    return made


def test_the_examples_of_the_module_hold():
    assert doctest.testmod(histogram).failed == 0


def test_bounds_grow_by_a_quarter_at_most():
    bounds = [upper_bound_s(index) for index in range(BUCKETS)]
    assert bounds[3] == 2e-6
    assert all(low < high <= low * 1.2501 for low, high in pairwise(bounds))


@given(durations_ns)
def test_a_duration_falls_below_the_bound_of_its_bucket(value):
    ((index, count),) = counted([value]).sparse().items()
    assert count == 1
    assert value / 1e9 < upper_bound_s(index) or index == BUCKETS - 1
    assert index == 0 or value / 1e9 >= upper_bound_s(index - 1)


def test_what_is_longer_than_all_bounds_counts_in_the_last():
    assert counted([10**15]).sparse() == {BUCKETS - 1: 1}


def test_a_clock_that_was_set_back_does_no_harm():
    assert counted([-5]).sparse() == {0: 1}


@given(st.lists(st.integers(min_value=1_250, max_value=10**12), min_size=1, max_size=60), st.floats(0, 1))
def test_a_quantile_is_between_the_extremes_to_within_a_bucket(values, fraction):
    told = quantile(counted(values).sparse(), fraction)
    assert told is not None
    assert min(values) / 1e9 / 1.2501 <= told <= max(values) / 1e9 * 1.2501


@given(st.integers(min_value=1_250, max_value=10**12), st.integers(1, 100))
def test_the_median_of_equal_durations_is_theirs_to_an_eighth(value, times):
    assert quantile(counted([value] * times).sparse(), 0.5) == pytest.approx(value / 1e9, rel=0.126)


def test_there_is_no_quantile_of_nothing():
    assert quantile({}, 0.5) is None
    assert quantile({7: 0}, 0.5) is None


@given(st.lists(durations_ns, max_size=30), st.lists(durations_ns, max_size=30))
def test_two_together_are_one_of_both(first, second):
    assert merged([counted(first).sparse(), counted(second).sparse()]) == counted([*first, *second]).sparse()


@given(st.lists(durations_ns, max_size=30), st.lists(durations_ns, max_size=30))
def test_a_difference_is_what_came_between(first, second):
    both = counted([*first, *second]).sparse()
    assert difference(both, counted(first).sparse()) == counted(second).sparse()
