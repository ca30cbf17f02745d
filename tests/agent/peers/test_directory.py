"""`PeerDirectory`: who is known by name, id and both, and what becomes of those that come back or are forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from arpc.agent.membership import WorkerRecord
from arpc.agent.peers.directory import PeerDirectory
from arpc.errors import UnknownWorkerError
from arpc.ids import WorkerInfo

ME = WorkerInfo("me", 0)


class FakePeer:
    """What the directory needs of a `Peer`."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info
        self.incarnation: int | None = None
        self.is_verified = True
        self.is_at_rest = True
        self.main_by_value: bool | None = None

    def succeeded_by(self, info: WorkerInfo) -> None:
        self.info = info


class Directory(PeerDirectory):
    """A directory of fake peers, which notes those that were replaced."""

    def __init__(self, *, is_elastic: bool = False) -> None:
        make: Any = FakePeer
        self.replaced: list[WorkerInfo] = []
        super().__init__(
            ME,
            make,
            is_elastic=is_elastic,
            same_main=lambda main: main == "my script",
            replaced=lambda peer: self.replaced.append(peer.info),
        )


def record(name: str, id_: int, incarnation: int = 1, main: str = "my script") -> WorkerRecord:
    return WorkerRecord(name, id_, incarnation, (f"memory://{name}",), "machine", main)


@pytest.fixture
def directory() -> Directory:
    made = Directory()
    made.add(record("me", 0))
    made.add(record("other", 1, main="another script"))
    return made


def test_a_peer_is_found_by_name_id_and_both(directory):
    peer = directory.get("other")
    assert peer is not None
    assert directory.get(1) is directory.get(WorkerInfo("other", 1)) is directory.known("other") is peer
    assert [known.info.name for known in directory] == ["me", "other"], "each of them once"


def test_the_same_record_again_is_the_same_peer(directory):
    peer = directory.get("other")
    assert directory.add(record("other", 1)) is peer
    assert directory.replaced == []


@pytest.mark.parametrize("to", ["nobody", 7, WorkerInfo("other", 7), WorkerInfo("nobody", 1)])
def test_who_is_not_known(directory, to):
    assert directory.get(to) is None
    with pytest.raises(UnknownWorkerError, match=r"'me' knows no worker .*; it knows me, other") as caught:
        directory.known(to)
    assert not caught.value.may_have_run


@pytest.mark.parametrize("to", [["other"], {}, 1.5, None])
def test_what_is_no_worker(directory, to):
    assert directory.get(to) is None
    with pytest.raises(TypeError, match="a worker is given by name, id or WorkerInfo"):
        directory.known(to)


def test_how_people_call_a_worker(directory):
    assert [directory.name_of(to) for to in ("other", 1, WorkerInfo("other", 1))] == ["other"] * 3
    assert directory.name_of("nobody") == "nobody"
    assert directory.name_of(7) == "7"


def test_functions_of_the_script_travel_by_value_to_those_who_run_another(directory):
    assert directory.known("me").main_by_value is False
    assert directory.known("other").main_by_value is True


@pytest.mark.parametrize("is_elastic", [False, True])
def test_in_an_elastic_group_others_are_asked_for_before_they_are_called(is_elastic):
    directory = Directory(is_elastic=is_elastic)
    assert directory.add(record("me", 0)).is_verified
    assert directory.add(record("other", 1)).is_verified is not is_elastic


# -- those that come back


def test_a_worker_that_came_back_under_its_name(directory):
    before = directory.known("other")
    peer = directory.add(record("other", 5, incarnation=2))
    assert peer is before, "calls that wait find it"
    assert peer.info == WorkerInfo("other", 5)
    assert peer.incarnation == 2
    assert directory.replaced == [WorkerInfo("other", 1)]
    assert directory.get(1) is None
    assert directory.get(WorkerInfo("other", 1)) is None
    assert directory.get(5) is peer


# -- those that are forgotten


@pytest.fixture
def elastic() -> Directory:
    made = Directory(is_elastic=True)
    made.add(record("me", 0))
    made.add(record("other", 1))
    return made


def test_a_group_of_fixed_size_forgets_nobody(directory):
    assert not directory.forget(WorkerInfo("other", 1))
    assert directory.get("other") is not None


def test_a_worker_that_is_gone_is_forgotten_by_all_its_keys(elastic):
    assert elastic.forget(WorkerInfo("other", 1))
    assert [elastic.get(to) for to in ("other", 1, WorkerInfo("other", 1))] == [None] * 3
    assert elastic.forget(WorkerInfo("other", 1)), "again"


def test_a_worker_with_something_under_way_is_kept(elastic):
    elastic.known("other").is_at_rest = False
    assert not elastic.forget(WorkerInfo("other", 1))
    assert elastic.get(1) is not None


def test_a_successor_is_not_forgotten_with_the_one_before(elastic):
    elastic.add(record("other", 5, incarnation=2))
    assert elastic.forget(WorkerInfo("other", 1))
    assert elastic.get("other") is elastic.get(5)
    assert elastic.get(5) is not None
