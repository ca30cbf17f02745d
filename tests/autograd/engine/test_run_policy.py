"""Which runs happen on the loop, and which in a thread."""

from __future__ import annotations

from functools import partial

import torch

from arpc.autograd.engine.run import Engine
from arpc.autograd.engine.run_policy import SHORT_ELEMENTS, SHORT_NODES, SHORT_S, Extent, RunPolicy
from arpc.autograd.passes.plan import Planner
from arpc.autograd.passes.protocol import Run


def extent_of(tensor: torch.Tensor, elements: int = 2) -> Extent:
    planner = Planner({}, [(tensor.grad_fn, 0)])
    assert planner.walk(1 << 30)
    plan = planner.plan()
    engine = Engine(plan.owners, plan.leaves, retain_graph=False)
    return engine.extent(Run(plan.regions, [], may_cross=False))._replace(elements=elements)


def small(elements: int = 2) -> Extent:
    return extent_of((torch.ones(2, requires_grad=True) * 2).sum(), elements)


def test_a_new_graph_is_judged_by_its_size():
    x = torch.ones(2, requires_grad=True)
    long = x
    for _ in range(SHORT_NODES + 1):
        long = long + 1
    policy = RunPolicy()
    assert policy.is_short(small())
    assert not policy.is_short(small(SHORT_ELEMENTS + 1))
    assert not policy.is_short(extent_of(long))
    # neither its leaf nor its root tells
    assert not policy.is_short(extent_of(x[:1].expand(SHORT_ELEMENTS + 1).sum()))


def test_one_that_kept_the_cpu_busy_goes_to_a_thread_at_once_and_may_come_back():
    policy, extent = RunPolicy(), small()
    policy.took(extent, 2 * SHORT_S, 2 * SHORT_S)
    assert not policy.is_short(extent)
    assert policy.is_short(small(3))
    policy.took(extent, SHORT_S / 10, SHORT_S / 10)
    assert policy.is_short(extent)


def test_one_that_waits_again_and_again_goes_to_a_thread():
    policy, extent = RunPolicy(), small()
    for _ in range(20):
        policy.took(extent, 100 * SHORT_S, SHORT_S / 10)
    assert not policy.is_short(extent)


def test_one_that_was_disturbed_stays():
    policy, extent = RunPolicy(), small()
    for seconds in (SHORT_S / 10, 100 * SHORT_S, SHORT_S / 10, 100 * SHORT_S):
        policy.took(extent, seconds, SHORT_S / 10)
        assert policy.is_short(extent)


def test_one_that_is_known_is_looked_at_again_only_if_it_takes_long(monkeypatch):
    clock, cpu_reads = [0.0], [0]

    def thread_time() -> float:
        cpu_reads[0] += 1
        return clock[0]

    def take(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr("arpc.autograd.engine.run_policy.perf_counter", lambda: clock[0])
    monkeypatch.setattr("arpc.autograd.engine.run_policy.thread_time", thread_time)
    policy, extent = RunPolicy(), small()
    for seconds in (SHORT_S / 10, SHORT_S / 10, 2 * SHORT_S):
        policy.run(partial(take, seconds), extent)
        assert policy.is_short(extent)
    assert cpu_reads[0] == 2
    policy.run(partial(take, SHORT_S / 10), extent)  # it was disturbed
    policy.run(partial(take, SHORT_S / 10), extent)
    assert cpu_reads[0] == 4
    for _ in range(2):  # it has become longer
        policy.run(partial(take, 2 * SHORT_S), extent)
    assert not policy.is_short(extent)


def test_one_that_takes_long_again_and_again_is_timed_now_and_then(monkeypatch):
    clock, cpu_reads, runs = [0.0], [0], [0]

    def thread_time() -> float:
        cpu_reads[0] += 1
        return clock[0]

    def take(seconds: float) -> None:
        runs[0] += 1
        clock[0] += seconds

    monkeypatch.setattr("arpc.autograd.engine.run_policy.perf_counter", lambda: clock[0])
    monkeypatch.setattr("arpc.autograd.engine.run_policy.thread_time", thread_time)
    policy, extent = RunPolicy(), small()
    for _ in range(2):  # the first may have loaded something
        policy.run(partial(take, 2 * SHORT_S), extent)
    assert cpu_reads[0] == 4
    for _ in range(32):
        policy.run(partial(take, 2 * SHORT_S), extent)
        assert not policy.is_short(extent)
    assert cpu_reads[0] == 8
    for _ in range(16):  # it has become shorter
        policy.run(partial(take, SHORT_S / 10), extent)
    assert policy.is_short(extent)
    assert runs[0] == 50


def test_not_all_graphs_are_remembered():
    policy, extent = RunPolicy(), small()
    for elements in range(5000):
        policy.took(extent._replace(elements=elements), 0.0, 0.0)
    assert len(policy._seconds) <= 1024
