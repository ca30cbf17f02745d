from __future__ import annotations

import os

import pytest

from arpc.bench import machine
from arpc.bench.machine import ForeignLoad, Steadiness, describe_machine


class FakeMachine:
    """Ticks of the machine and of processes, and a clock, all moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.busy = 1000
        self.ticks: dict[int, int] = {}
        self.now_s = 0.0
        monkeypatch.setattr(machine, "_busy_ticks", lambda: self.busy)
        monkeypatch.setattr(machine, "_process_ticks", lambda pid: self.ticks[pid])
        monkeypatch.setattr(machine, "family", lambda leaders: set(self.ticks))
        monkeypatch.setattr(machine.time, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
        monkeypatch.setattr(machine.os, "sysconf", lambda name: 100)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    return FakeMachine(monkeypatch)


def test_what_the_measured_processes_take_is_not_foreign(fake: FakeMachine) -> None:
    fake.ticks = {1: 50, 2: 70}
    load = ForeignLoad([1])
    fake.now_s += 1.0  # 200 ticks on two CPUs
    fake.busy += 120
    fake.ticks = {1: 100, 2: 120}
    assert load.share() == pytest.approx(20 / 200)


def test_a_process_born_meanwhile_belongs_to_the_family(fake: FakeMachine) -> None:
    fake.ticks = {1: 50}
    load = ForeignLoad([1])
    fake.now_s += 1.0
    fake.busy += 100
    fake.ticks = {1: 90, 7: 60}
    assert load.share() == 0.0


def test_what_a_process_took_that_is_gone_counts_as_foreign(fake: FakeMachine) -> None:
    fake.ticks = {1: 50, 2: 10}
    load = ForeignLoad([1])
    fake.now_s += 1.0
    fake.busy += 100
    fake.ticks = {1: 60}
    assert load.share() == pytest.approx(90 / 200)


def test_real_ticks_of_this_process_are_read() -> None:
    assert machine._process_ticks(os.getpid()) > 0
    assert machine._process_ticks(2**22 + 1) == 0  # above the largest pid there can be
    assert ForeignLoad([os.getpid()]).share() >= 0.0


def test_steadiness_is_one_until_there_are_probes() -> None:
    steadiness = Steadiness()
    assert steadiness.spread == 1.0
    for _ in range(3):
        steadiness.probe()
    assert steadiness.spread >= 1.0
    assert steadiness.describe().startswith("Machine: ")


def test_the_machine_is_described_with_the_versions_that_matter() -> None:
    described = describe_machine()
    assert isinstance(described["versions"], dict)
    assert "torch" in described["versions"]
    assert described["cpus"] == len(os.sched_getaffinity(0))
