"""Collections that find nothing get rarer, one that finds something brings the usual pace back; what they skip."""

from __future__ import annotations

import asyncio
import gc

import pytest

import arpc
from arpc import runtime, startup
from arpc.garbage import Backoff, Freezer
from arpc.testing import cluster
from tests.conftest import LOOP_FACTORIES


@pytest.fixture(autouse=True)
def thresholds(monkeypatch):
    """None of what other tests leave is found by the collections of these, nor does one come by itself.

    Workers that other tests have abandoned may still want rarer collections: they are not heard here.
    """
    before, callbacks = gc.get_threshold(), list(gc.callbacks)
    gc.callbacks.clear()
    alone = Backoff()
    monkeypatch.setattr(startup, "BACKOFF", alone)
    monkeypatch.setattr(runtime, "BACKOFF", alone)
    freezer = Freezer()
    monkeypatch.setattr(startup, "FREEZER", freezer)
    monkeypatch.setattr(runtime, "FREEZER", freezer)
    gc.set_threshold(100_000, 10, 10)
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.callbacks[:] = callbacks
    gc.set_threshold(*before)


@pytest.fixture
def loop():
    made = asyncio.new_event_loop()
    yield made
    made.close()


def first_threshold() -> int:
    return gc.get_threshold()[0]


def leave_a_cycle() -> None:
    cycle: list[object] = []
    cycle.append(cycle)


def test_a_collection_at_the_limit_of_recursion_changes_nothing(loop, monkeypatch):
    backoff = Backoff()
    backoff.begin(4, loop)
    before = first_threshold()

    def too_deep() -> int:
        raise RecursionError

    with monkeypatch.context() as patch:
        patch.setattr(backoff, "_program_threshold", too_deep)
        gc.collect(0)  # warnings are errors here, and so would be an exception that cannot be raised
        assert first_threshold() == before
    gc.collect(0)
    assert first_threshold() == 2 * before
    backoff.end(4, loop)


def test_collections_that_find_nothing_get_rarer_up_to_the_factor(loop):
    backoff = Backoff()
    backoff.begin(4, loop)
    seen = []
    for _ in range(4):
        gc.collect(0)
        seen.append(first_threshold())
    assert seen == [200_000, 400_000, 400_000, 400_000]
    assert gc.get_threshold()[1:] == (10, 10)
    backoff.end(4, loop)
    assert first_threshold() == 100_000


def test_one_that_finds_something_brings_the_usual_pace_back(loop):
    backoff = Backoff()
    backoff.begin(16, loop)
    gc.collect(0)
    gc.collect(0)
    leave_a_cycle()
    gc.collect(0)
    assert first_threshold() == 100_000
    gc.collect(0)
    assert first_threshold() == 200_000
    backoff.end(16, loop)


def test_a_threshold_that_the_program_sets_is_the_usual_one_from_then_on(loop):
    backoff = Backoff()
    backoff.begin(2, loop)
    gc.collect(0)
    gc.set_threshold(50_000, 10, 10)
    gc.collect(0)
    assert first_threshold() == 100_000
    gc.collect(0)
    assert first_threshold() == 100_000
    backoff.end(2, loop)
    assert first_threshold() == 50_000


def test_a_threshold_that_is_set_last_stays(loop):
    backoff = Backoff()
    backoff.begin(2, loop)
    gc.collect(0)
    gc.set_threshold(70_000, 10, 10)
    backoff.end(2, loop)
    assert first_threshold() == 70_000


def test_collections_that_are_switched_off_stay_so(loop):
    backoff = Backoff()
    backoff.begin(16, loop)
    gc.set_threshold(0, 10, 10)
    gc.collect(0)
    assert first_threshold() == 0
    backoff.end(16, loop)
    assert first_threshold() == 0


def test_the_last_of_several_who_want_it_ends_it(loop):
    backoff = Backoff()
    callbacks = len(gc.callbacks)
    backoff.begin(1, loop)
    assert len(gc.callbacks) == callbacks, "a factor of 1 is none"
    backoff.begin(2, loop)
    backoff.begin(4, loop)
    gc.collect(0)
    gc.collect(0)
    assert first_threshold() == 400_000
    backoff.end(4, loop)
    gc.collect(0)
    assert first_threshold() == 200_000
    backoff.end(1, loop)
    backoff.end(2, loop)
    assert first_threshold() == 100_000
    assert len(gc.callbacks) == callbacks


def test_a_threshold_that_is_huge_already_stays_within_what_python_takes(loop):
    backoff = Backoff()
    backoff.begin(16, loop)
    for huge, most in ((1 << 29, 1 << 30), ((1 << 31) - 1, (1 << 31) - 1)):
        gc.set_threshold(huge, 10, 10)
        for _ in range(3):
            gc.collect(0)
        assert first_threshold() == most
    backoff.end(16, loop)


def test_an_end_without_a_beginning_is_none(loop):
    backoff = Backoff()
    backoff.end(2, loop)
    backoff.begin(4, loop)
    backoff.end(2, loop)
    gc.collect(0)
    assert first_threshold() == 200_000
    backoff.end(4, loop)
    assert first_threshold() == 100_000


async def test_workers_want_it_until_they_are_shut_down():
    callbacks = len(gc.callbacks)
    async with cluster(2, options=arpc.RpcOptions(gc_freeze=False)):
        assert len(gc.callbacks) == callbacks + 1
    assert len(gc.callbacks) == callbacks
    assert first_threshold() == 100_000


async def test_workers_that_shall_leave_it_alone():
    callbacks = list(gc.callbacks)
    async with cluster(2, options=arpc.RpcOptions(gc_freeze=False, gc_backoff=1)):
        assert gc.callbacks == callbacks


@pytest.mark.parametrize("make_loop", LOOP_FACTORIES.values(), ids=LOOP_FACTORIES)
def test_what_a_worker_wants_that_is_abandoned_ends_with_its_loop(make_loop):
    backoff, callbacks = Backoff(), len(gc.callbacks)
    abandoned, kept = make_loop(), make_loop()
    backoff.begin(8, abandoned)
    for _ in range(3):
        gc.collect(0)
    assert first_threshold() == 800_000
    abandoned.close()
    gc.collect(0)
    assert first_threshold() == 100_000
    backoff.begin(2, kept)  # its collections are rarer than usual, and than those of nobody else
    for _ in range(3):
        gc.collect(0)
    assert first_threshold() == 200_000
    backoff.end(2, kept)
    kept.close()
    assert first_threshold() == 100_000
    assert len(gc.callbacks) == callbacks


# -- what is frozen


def is_frozen(sought: object) -> bool:
    return not any(found is sought for found in gc.get_objects())


async def test_nothing_of_a_worker_is_frozen():
    before = [object]
    async with cluster(1, options=arpc.RpcOptions(gc_freeze=True, gc_backoff=1), elastic=True) as group:
        assert is_frozen(before)
        assert not is_frozen(group[0])
        assert not is_frozen(group[0].agent.codec.pickler)
        between = [object]
        second = await group.add("second")
        assert not is_frozen(between)  # such as the objects of a call of the first
        await second.shutdown()
        assert is_frozen(before)
    assert not is_frozen(before)


async def test_a_worker_that_fails_to_start_leaves_nothing_frozen():
    before = [object]
    with pytest.raises(arpc.ConfigurationError):
        await arpc.init_rpc("a name with spaces", options=arpc.RpcOptions(gc_freeze=True))
    assert not is_frozen(before)


@pytest.mark.parametrize("make_loop", LOOP_FACTORIES.values(), ids=LOOP_FACTORIES)
def test_a_worker_freezes_again_if_the_one_before_was_abandoned(make_loop):
    freezer, abandoned, kept = Freezer(), make_loop(), make_loop()
    freezer.begin(abandoned)
    later = [object]
    abandoned.close()
    freezer.begin(kept)
    assert is_frozen(later)
    freezer.end(abandoned)
    assert is_frozen(later)
    freezer.end(kept)
    assert not is_frozen(later)
    kept.close()
