"""Which runs happen on the loop, and which in a thread."""

from __future__ import annotations

from functools import partial

import torch

from arpc.autograd.engine import Source
from arpc.autograd.graph import Plan, Planner
from arpc.autograd.pace import SHORT_ELEMENTS, SHORT_NODES, SHORT_S, Pace


def plan_of(tensor: torch.Tensor) -> Plan:
    planner = Planner([Source([(tensor.grad_fn, 0)], None)])
    assert planner.walk(1 << 30)
    return planner.plan()


def small() -> Plan:
    return plan_of((torch.ones(2, requires_grad=True) * 2).sum())


def test_a_new_graph_is_judged_by_its_size():
    x = torch.ones(2, requires_grad=True)
    long = x
    for _ in range(SHORT_NODES + 1):
        long = long + 1
    pace = Pace()
    assert pace.is_short(small(), 2)
    assert not pace.is_short(small(), SHORT_ELEMENTS + 1)
    assert not pace.is_short(plan_of(long), 2)
    # neither its leaf nor its root tells
    assert not pace.is_short(plan_of(x[:1].expand(SHORT_ELEMENTS + 1).sum()), 2)


def test_one_that_kept_the_cpu_busy_goes_to_a_thread_at_once_and_may_come_back():
    pace, plan = Pace(), small()
    pace.took(plan, 2, 2 * SHORT_S, 2 * SHORT_S)
    assert not pace.is_short(plan, 2)
    assert pace.is_short(plan, 3)
    pace.took(plan, 2, SHORT_S / 10, SHORT_S / 10)
    assert pace.is_short(plan, 2)


def test_one_that_waits_again_and_again_goes_to_a_thread():
    pace, plan = Pace(), small()
    for _ in range(20):
        pace.took(plan, 2, 100 * SHORT_S, SHORT_S / 10)
    assert not pace.is_short(plan, 2)


def test_one_that_was_disturbed_stays():
    pace, plan = Pace(), small()
    for seconds in (SHORT_S / 10, 100 * SHORT_S, SHORT_S / 10, 100 * SHORT_S):
        pace.took(plan, 2, seconds, SHORT_S / 10)
        assert pace.is_short(plan, 2)


def test_one_that_is_known_is_looked_at_again_only_if_it_takes_long(monkeypatch):
    clock, cpu_reads = [0.0], [0]

    def thread_time() -> float:
        cpu_reads[0] += 1
        return clock[0]

    def take(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr("arpc.autograd.pace.perf_counter", lambda: clock[0])
    monkeypatch.setattr("arpc.autograd.pace.thread_time", thread_time)
    pace, plan = Pace(), small()
    for seconds in (SHORT_S / 10, SHORT_S / 10, 2 * SHORT_S):
        pace.run(partial(take, seconds), plan, 2)
        assert pace.is_short(plan, 2)
    assert cpu_reads[0] == 2
    pace.run(partial(take, SHORT_S / 10), plan, 2)  # it was disturbed
    pace.run(partial(take, SHORT_S / 10), plan, 2)
    assert cpu_reads[0] == 4
    for _ in range(2):  # it has become longer
        pace.run(partial(take, 2 * SHORT_S), plan, 2)
    assert not pace.is_short(plan, 2)


def test_one_that_takes_long_again_and_again_is_timed_now_and_then(monkeypatch):
    clock, cpu_reads, runs = [0.0], [0], [0]

    def thread_time() -> float:
        cpu_reads[0] += 1
        return clock[0]

    def take(seconds: float) -> None:
        runs[0] += 1
        clock[0] += seconds

    monkeypatch.setattr("arpc.autograd.pace.perf_counter", lambda: clock[0])
    monkeypatch.setattr("arpc.autograd.pace.thread_time", thread_time)
    pace, plan = Pace(), small()
    for _ in range(2):  # the first may have loaded something
        pace.run(partial(take, 2 * SHORT_S), plan, 2)
    assert cpu_reads[0] == 4
    for _ in range(32):
        pace.run(partial(take, 2 * SHORT_S), plan, 2)
        assert not pace.is_short(plan, 2)
    assert cpu_reads[0] == 8
    for _ in range(16):  # it has become shorter
        pace.run(partial(take, SHORT_S / 10), plan, 2)
    assert pace.is_short(plan, 2)
    assert runs[0] == 50


def test_not_all_graphs_are_remembered():
    pace, plan = Pace(), small()
    for elements in range(5000):
        pace.took(plan, elements, 0.0, 0.0)
    assert len(pace._seconds) <= 1024


def test_one_that_was_too_long_once_is_tried_again_and_one_that_is_far_too_long_is_not():
    pace, plan, ran = Pace(), small(), []

    def run(turn: int) -> bool:
        ran.append(turn)
        return True

    pace.took(plan, 2, 2 * SHORT_S, 2 * SHORT_S)
    pace.took(plan, 3, 200 * SHORT_S, 200 * SHORT_S)
    tried = [pace.try_to_run(run, range(plan.count), (plan.count, 2), turn) for turn in range(40)]
    assert tried.index(True) == 16
    assert all(tried[17:]), "it is known as short by now"
    assert len(ran) == 24
    assert not any(pace.try_to_run(run, range(plan.count), (plan.count, 3), turn) for turn in range(40))
