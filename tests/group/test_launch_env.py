from __future__ import annotations

import pytest

from arpc.errors import ConfigurationError
from arpc.group.launch_env import FIRST_PORT, PORTS, default_name, first_host, slurm_environment, slurm_port, variable

TASK = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_NODELIST": "gpu[08-09,11]",
}


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("login1", "login1"),
        (" a,b, c", "a"),
        ("gpu[1-3]", "gpu1"),
        ("gpu[08-10,12]", "gpu08"),
        ("gpu[099-101]", "gpu099"),
        ("a[1,3],b,c[2-3]", "a1"),
        ("rack[1-2]node[3,5].local", "rack1node3.local"),
    ],
)
def test_the_first_of_a_list_of_hosts(nodelist: str, first: str):
    assert first_host(nodelist) == first


@pytest.mark.parametrize("nodelist", ["", "gpu[1-", "gpu1]", "gpu[[1]]", "gpu[a-b]", "gpu[]", "gpu[1-]"])
def test_what_is_no_list_of_hosts(nodelist: str):
    with pytest.raises(ConfigurationError, match="list of nodes"):
        first_host(nodelist)


def test_a_task_of_srun_knows_its_place():
    assert slurm_environment(TASK) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu08",
        "MASTER_PORT": str(slurm_port("4242")),
    }


def test_a_step_may_be_smaller_than_its_job():
    step = {**TASK, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "gpu11"}
    made = slurm_environment(step)
    assert (made["WORLD_SIZE"], made["MASTER_ADDR"]) == ("2", "gpu11")


@pytest.mark.parametrize("missing", ["SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_NODELIST"])
def test_outside_of_a_step_slurm_says_nothing(missing: str):
    assert slurm_environment({name: value for name, value in TASK.items() if name != missing}) == {}


def test_ports_are_the_jobs_own_and_below_those_of_the_system():
    ports = {slurm_port(str(job)) for job in range(1000, 2000)}
    assert len(ports) == 1000
    assert all(FIRST_PORT <= port < FIRST_PORT + PORTS <= 32_768 for port in ports)
    assert slurm_port("1000", "1") != slurm_port("1000", "0")
    with pytest.raises(ConfigurationError, match="SLURM_JOB_ID"):
        slurm_port("batch")


def test_what_was_set_by_hand_comes_before_slurm():
    mine = {**TASK, "MASTER_ADDR": "elsewhere", "RANK": ""}
    assert variable("MASTER_ADDR", mine) == "elsewhere"
    assert variable("RANK", mine) == "5"
    assert variable("ARPC_NAME", mine) is None


def test_a_name_for_who_has_none():
    assert default_name(None, {"ARPC_NAME": "ps0", "RANK": "3"}) == "ps0"
    assert default_name(None, {"RANK": "3"}) == "worker3"
    assert default_name(2, {"RANK": "3"}) == "worker2"
    assert default_name(None, TASK) == "worker5"
    with pytest.raises(ConfigurationError, match="arpc launch"):
        default_name(None, {})
