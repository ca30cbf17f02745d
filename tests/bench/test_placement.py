from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from arpc.bench import placement
from arpc.bench.placement import cpus_of, place

THREADED = "import threading; threading.Thread(target=input, daemon=True).start(); print(flush=True); input()"


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes, each with two threads that wait."""
    started = [
        subprocess.Popen([sys.executable, "-c", THREADED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for child in started:
        assert child.stdout is not None
        child.stdout.readline()
    yield started
    for child in started:
        child.kill()
        child.communicate()


def affinities(pid: int) -> set[frozenset[int]]:
    threads = [task.name for task in Path(f"/proc/{pid}/task").iterdir()]
    return {frozenset(os.sched_getaffinity(int(task))) for task in threads}


def test_same_is_one_cpu_and_split_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_AVAILABLE", [3, 5, 7])
    assert cpus_of("same") == ({3}, {3})
    assert cpus_of("split") == ({3}, {5})
    assert cpus_of("free") == ({3, 5, 7}, {3, 5, 7})
    assert placement.can_split()


def test_one_cpu_cannot_be_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_AVAILABLE", [3])
    assert not placement.can_split()


def test_every_thread_is_moved_and_can_be_moved_back(children: list[subprocess.Popen[str]]) -> None:
    caller, callee = (child.pid for child in children)
    ours = os.sched_getaffinity(0)
    place("same", caller_pid=caller, callee_pid=callee)
    assert affinities(caller) == affinities(callee) == {frozenset(cpus_of("same")[0])}
    place("free", caller_pid=caller, callee_pid=callee)
    assert affinities(caller) == affinities(callee) == {frozenset(ours)}
    assert os.sched_getaffinity(0) == ours


def test_a_process_that_has_ended_is_passed_over(children: list[subprocess.Popen[str]]) -> None:
    caller, callee = children
    caller.kill()
    caller.wait()
    place("same", caller_pid=caller.pid, callee_pid=callee.pid)
    assert affinities(callee.pid) == {frozenset(cpus_of("same")[1])}
