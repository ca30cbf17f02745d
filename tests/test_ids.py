"""Names of workers, and ids that are unique over the group."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpc.errors import ConfigurationError
from arpc.ids import LOCAL_BITS, MAX_WORKER_ID, GloballyUniqueId, IdAllocator, WorkerInfo, check_worker_name


def test_a_worker_is_known_by_name_and_id():
    info = WorkerInfo("trainer", 3)
    assert (info.name, info.id) == info == ("trainer", 3)
    assert repr(info) == "WorkerInfo(id=3, name=trainer)"
    assert pickle.loads(pickle.dumps(info)) == copy.copy(info) == info
    assert {info: 1}[WorkerInfo("trainer", 3)] == 1


@given(worker=st.integers(0, MAX_WORKER_ID), local=st.integers(0, (1 << LOCAL_BITS) - 1))
def test_an_id_fits_sixty_four_bits_and_comes_back(worker, local):
    unique = GloballyUniqueId(worker, local)
    number = unique.to_int()
    assert 0 <= number < 1 << 64
    assert GloballyUniqueId.from_int(number) == unique


@given(st.lists(st.tuples(st.integers(0, MAX_WORKER_ID), st.integers(0, (1 << LOCAL_BITS) - 1)), unique=True))
def test_different_ids_are_different_numbers(pairs):
    assert len({GloballyUniqueId(*pair).to_int() for pair in pairs}) == len(pairs)


def test_ids_count_up_from_those_of_their_worker():
    allocator = IdAllocator(5)
    first, second = allocator.next(), allocator.next()
    assert first == GloballyUniqueId(5, 0)
    assert second == GloballyUniqueId(5, 1)
    assert first.to_int() == 5 << 48
    assert repr(first) == "GloballyUniqueId(created_on=5, local_id=0)"


def test_ids_of_many_threads_never_repeat():
    allocator = IdAllocator(1)
    made: list[list[GloballyUniqueId]] = [[] for _ in range(4)]

    def make(into: list[GloballyUniqueId]) -> None:
        into.extend(allocator.next() for _ in range(5_000))

    threads = [threading.Thread(target=make, args=(into,)) for into in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({unique for part in made for unique in part}) == 20_000


@pytest.mark.parametrize("name", ["a", "trainer-0", "ps_1", "node:3", "X" * 127, "0"])
def test_names_a_worker_may_have(name):
    assert check_worker_name(name) == name


@pytest.mark.parametrize("name", ["", "X" * 128, "with space", "dot.ted", "sl/ash", "ünicode", "line\n", None, 7, b"a"])
def test_names_a_worker_may_not_have(name):
    with pytest.raises(ConfigurationError, match="Worker name must match") as caught:
        check_worker_name(name)
    assert repr(name) in str(caught.value)
