"""A pair of real processes: the floor, which starts fastest."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from arpc.bench.nursery import Nursery
from arpc.bench.pairs import MeasurementFailedError, Pair
from arpc.bench.processes import family
from arpc.testing.endpoints import turns_until

CALL = {"function": "noop", "flavour": "def", "payload": "none", "budget_s": 0.01}


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    nursery = await Nursery.open(warm=False)
    pair = Pair("raw-unix", nursery)
    await pair.start()
    yield pair
    await pair.kill()
    await nursery.aclose()


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_it_measures_and_stops(pair: Pair) -> None:
    pids = pair.pids
    assert pair.running
    figures = await pair.measure("latency", dict(CALL), "same", timeout_s=30)
    assert figures["calls"] > 0
    await pair.stop()
    assert not pair.running
    assert not any(map(is_running, pids))


async def test_one_that_hangs_is_killed_and_can_be_started_again(pair: Pair) -> None:
    pids = pair.pids
    with pytest.raises(MeasurementFailedError, match="latency took longer than 0 s"):
        await pair.measure("latency", dict(CALL), "free", timeout_s=0)
    assert not pair.running
    assert not any(map(is_running, pids))
    await pair.start()
    assert (await pair.measure("latency", dict(CALL), "free", timeout_s=30))["p50_us"] > 0


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_all_processes_of_a_system_that_spins_are_stopped_in_between() -> None:
    nursery = await Nursery.open()
    pair = Pair("torch-three", nursery)
    try:
        await pair.start()
        everybody = family(pair.pids)
        assert len(everybody) == 4, "a caller and three callees"
        await turns_until(lambda: {state_of(pid) for pid in everybody} == {"T"})
        settings = {"name": "autograd on three workers/3 in a row", "flavour": "def", "budget_s": 0.01}
        assert (await pair.measure("shape", settings, "free", timeout_s=60))["p50_us"] > 0
        await turns_until(lambda: {state_of(pid) for pid in everybody} == {"T"})
    finally:
        await pair.kill()
        await nursery.aclose()
    await turns_until(lambda: not any(map(is_running, everybody)))  # a killed process takes a moment to end


async def test_what_went_wrong_is_told_from_the_other_process(pair: Pair) -> None:
    with pytest.raises(MeasurementFailedError, match="has no attribute 'no_such_thing'"):
        await pair.measure("no_such_thing", {}, "free", timeout_s=30)
    assert not pair.running


async def test_a_process_that_ended_is_told(pair: Pair) -> None:
    for pid in pair.pids:
        os.kill(pid, 9)
    with pytest.raises(MeasurementFailedError):
        await pair.measure("latency", dict(CALL), "free", timeout_s=30)
    assert not pair.running
