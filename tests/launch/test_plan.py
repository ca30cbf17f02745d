from __future__ import annotations

from pathlib import Path

import pytest

from arpc.errors import ConfigurationError
from arpc.launch.plan import MeetingPoint, as_group, environment_of, on_nodes, parse_resources, parse_roles


def test_roles_are_read_as_written():
    assert parse_roles(" ps=1, trainer = 3 ,") == {"ps": 1, "trainer": 3}


@pytest.mark.parametrize("text", ["ps", "ps=", "ps=x", "ps=-1", "ps=1,ps=2"])
def test_what_is_no_list_of_roles(text: str):
    with pytest.raises(ConfigurationError, match="role"):
        parse_roles(text)


def test_ranks_follow_the_order_of_roles():
    slots = as_group({"ps": 1, "trainer": 3})
    assert [slot.name for slot in slots] == ["ps0", "trainer0", "trainer1", "trainer2"]
    assert [slot.rank for slot in slots] == [0, 1, 2, 3]
    assert (slots[2].role, slots[2].role_rank, slots[2].role_size, slots[2].world_size) == ("trainer", 1, 3, 4)


def test_without_roles_all_are_workers():
    assert [slot.name for slot in as_group(2)] == ["worker0", "worker1"]


@pytest.mark.parametrize(
    "workers", [0, -1, True, {}, {"ps": 0}, {"ps": 1.5}, {"p s": 1}, {"ps": 11, "ps1": 1}, 1 << 17]
)
def test_what_is_no_group(workers):
    with pytest.raises(ConfigurationError):
        as_group(workers)


def test_a_worker_finds_its_place_in_its_environment():
    slot = as_group({"ps": 1, "trainer": 2})[2]
    meeting = MeetingPoint("127.0.0.1", 2345, incarnation=1, max_restarts=3, secret_file=Path("/run/secret"))
    made = environment_of(slot, meeting, {"OMP_NUM_THREADS": "4"})
    assert made == {
        "ARPC_NAME": "trainer1",
        "ARPC_ROLE": "trainer",
        "ARPC_ROLE_RANK": "1",
        "ARPC_ROLE_SIZE": "2",
        "ARPC_INCARNATION": "1",
        "ARPC_SECRET_FILE": "/run/secret",
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "2345",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "PYTHONUNBUFFERED": "1",
    }


def test_processes_share_the_cpus():
    (slot,) = as_group(1)
    assert int(environment_of(slot, MeetingPoint("127.0.0.1", 1), {})["OMP_NUM_THREADS"]) >= 1
    crowd = as_group(1000)[0]
    assert environment_of(crowd, MeetingPoint("127.0.0.1", 1), {})["OMP_NUM_THREADS"] == "1"


def test_what_a_worker_takes():
    assert parse_resources("CPU=2, GPU=0.5,") == {"CPU": 2.0, "GPU": 0.5}
    with pytest.raises(ConfigurationError, match="CPU=2,GPU=1"):
        parse_resources("CPU")


def test_ranks_are_numbered_on_each_node():
    places = on_nodes(["b", "a", "b"])
    assert [place["LOCAL_RANK"] for place in places] == ["0", "0", "1"]
    assert [place["LOCAL_WORLD_SIZE"] for place in places] == ["2", "1", "2"]
    assert [place["GROUP_RANK"] for place in places] == ["0", "1", "0"]
    assert {place["GROUP_WORLD_SIZE"] for place in places} == {"2"}
