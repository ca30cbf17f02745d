"""Clocks of workers, told apart by round trips and calls."""

from __future__ import annotations

import time

from arpc.profiler.clocks import Clock, measure_clock, narrow


async def test_the_error_bounds_the_guess() -> None:
    offset_ns = 5_000_000_000

    async def ask() -> int:
        return time.perf_counter_ns() + offset_ns

    clock = await measure_clock(ask, round_trips=3)
    assert abs(clock.offset_ns - offset_ns) <= clock.error_ns


def test_calls_narrow_it_down() -> None:
    true_offset = 1000
    wide = Clock(true_offset + 300, 500)
    pairs = [((0, 100), (true_offset + 20, true_offset + 70)), ((200, 300), (true_offset + 210, true_offset + 260))]
    clock = narrow(wide, pairs)
    assert clock == Clock(990, 20)
    assert abs(clock.offset_ns - true_offset) <= clock.error_ns < wide.error_ns


def test_calls_that_contradict_it_are_not_believed() -> None:
    clock = Clock(0, 10)
    assert narrow(clock, [((0, 100), (500, 520))]) == clock
