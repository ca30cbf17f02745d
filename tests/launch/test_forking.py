"""Which workers may be forked."""

from __future__ import annotations

import os
import sys

import pytest

from arpc.launch.forking import can_fork, can_fork_worker, shared_environment, template_command

PYTHON = sys.executable


@pytest.mark.parametrize("command", [[PYTHON, "train.py"], [PYTHON, "/a/b.py", "-x"], [PYTHON, "-m", "package.train"]])
def test_scripts_and_modules_are_forked(command: list[str]):
    assert can_fork_worker(command, {}, {})


@pytest.mark.parametrize(
    "command",
    [
        [],
        [PYTHON],
        [PYTHON, "-m"],
        [PYTHON, "-O", "train.py"],
        [PYTHON, "-c", "pass"],
        [PYTHON, "train.pyz"],
        [PYTHON, "train.pyc"],
        ["/bin/sh", "train.py"],
    ],
)
def test_what_else_there_is_to_run_is_not(command: list[str]):
    assert not can_fork_worker(command, {}, {})


def test_what_a_launch_sets_for_each_worker_may_differ():
    first = {"RANK": "0", "ARPC_NAME": "a", "MASTER_PORT": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "2"}
    shared = shared_environment(first)
    assert shared["OMP_NUM_THREADS"] == "2"
    assert shared["RANK"] is shared["ARPC_NAME"] is shared["MASTER_PORT"] is None
    assert can_fork_worker([PYTHON, "x.py"], first | {"RANK": "1", "ARPC_NAME": "b", "ARPC_HTTP": "c"}, shared)


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "LD_PRELOAD", "PYTHONHASHSEED", "ANYTHING", "XRANK", "LOCAL_DIR"])
def test_nothing_else_may(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(name, raising=False)
    command = [PYTHON, "x.py"]
    assert can_fork_worker(command, {name: "1"}, {name: "1"})
    assert not can_fork_worker(command, {name: "1"}, {})
    assert not can_fork_worker(command, {}, {name: "1"})
    assert not can_fork_worker(command, {name: "1"}, {name: "2"})


def test_what_is_inherited_is_no_difference(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ANYTHING", "1")
    command = [PYTHON, "x.py"]
    assert can_fork_worker(command, {"ANYTHING": "1"}, {})
    assert not can_fork_worker(command, {"ANYTHING": None}, {})


def test_what_this_process_has_of_its_own_is_not_shared(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ARPC_NAME", "a launcher that was launched")
    assert shared_environment({})["ARPC_NAME"] is None
    assert os.environ["ARPC_NAME"]


def test_the_template_shows_what_is_forked_from_it():
    assert template_command([PYTHON, "x.py", "--size"])[-2:] == ["x.py", "--size"]


def test_only_linux_adopts_orphans(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "linux")
    assert can_fork()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not can_fork()
