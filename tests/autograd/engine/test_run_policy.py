"""Which runs happen on the loop, and which in a thread."""

from __future__ import annotations

import pytest
import torch

from arpc.autograd.engine.run_policy import SHORT_ELEMENTS, SHORT_NODES, SHORT_S, SLICE_S, RunPolicy, extent_of
from arpc.autograd.passes.plan import Plan
from arpc.autograd.passes.protocol import Run


class Graph:
    """What leads to a tensor, as a policy looks at it."""

    def __init__(self, tensor: torch.Tensor | None = None, elements: int = 2) -> None:
        """A small graph if there is no tensor. ``elements``: how many are said to enter it, and to be in its leaves."""
        if tensor is None:
            tensor = (torch.ones(2, requires_grad=True) * 2).sum()
        self.plan = Plan({}, [(tensor.grad_fn, 0)])
        assert self.plan.walk(1 << 30)
        self.run = Run(self.plan.regions, [], may_cross=False)
        self.extent = extent_of(self.run, self.plan)[0], elements

    def is_short(self, policy: RunPolicy) -> bool:
        return policy.is_short(self.extent, self.run, self.plan)


def test_a_new_graph_is_judged_by_its_size():
    x = torch.ones(2, requires_grad=True)
    long = x
    for _ in range(SHORT_NODES + 1):
        long = long + 1
    policy = RunPolicy()
    assert Graph().is_short(policy)
    assert not Graph(elements=SHORT_ELEMENTS + 1).is_short(policy)
    assert not Graph(long).is_short(policy)
    # neither its leaf nor its root tells
    assert not Graph(x[:1].expand(SHORT_ELEMENTS + 1).sum()).is_short(policy)


def test_one_that_kept_the_cpu_busy_goes_to_a_thread_at_once_and_may_come_back():
    policy, graph = RunPolicy(), Graph()
    policy.took(graph.extent, 2 * SHORT_S, 2 * SHORT_S)
    assert not graph.is_short(policy)
    assert Graph(elements=3).is_short(policy)
    policy.took(graph.extent, SHORT_S / 10, SHORT_S / 10)
    assert graph.is_short(policy)


def test_slices_are_as_long_as_the_nodes_of_the_last_long_run_suggest():
    policy = RunPolicy()
    policy.took((100, 1), 10 * SLICE_S, 10 * SLICE_S)
    assert policy.nodes_per_slice == pytest.approx(10)
    policy.took((1, 1), SHORT_S / 100, SHORT_S / 100)
    assert policy.nodes_per_slice == pytest.approx(10), "a short run says nothing"


def test_one_slow_run_does_not_cut_all_later_ones():
    """Its nodes may have waited for something. The first slice of the next run shows how long nodes take."""
    policy, extent = RunPolicy(), (10, 1)
    for _ in range(2):
        policy.run(extent, int)
    policy.took((2, 1), 1.0, 1.0)
    assert policy.nodes_per_slice < 1
    policy.run(extent, int)
    assert policy.nodes_per_slice > 100


def test_runs_in_anomaly_mode_are_not_cut():
    policy = RunPolicy()
    with torch.autograd.set_detect_anomaly(True):
        assert policy.nodes_per_slice == float("inf")
    assert policy.nodes_per_slice < 1000


def test_one_that_waits_again_and_again_goes_to_a_thread():
    policy, graph = RunPolicy(), Graph()
    for _ in range(20):
        policy.took(graph.extent, 100 * SHORT_S, SHORT_S / 10)
    assert not graph.is_short(policy)


def test_one_that_was_disturbed_stays():
    policy, graph = RunPolicy(), Graph()
    for seconds in (SHORT_S / 10, 100 * SHORT_S, SHORT_S / 10, 100 * SHORT_S):
        policy.took(graph.extent, seconds, SHORT_S / 10)
        assert graph.is_short(policy)


def test_one_that_is_known_is_looked_at_again_only_if_it_takes_long(monkeypatch):
    clock, cpu_reads = [0.0], [0]

    def thread_time() -> float:
        cpu_reads[0] += 1
        return clock[0]

    def take(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr("arpc.autograd.engine.run_policy.perf_counter", lambda: clock[0])
    monkeypatch.setattr("arpc.autograd.engine.run_policy.thread_time", thread_time)
    policy, graph = RunPolicy(), Graph()
    for seconds in (SHORT_S / 10, SHORT_S / 10, 2 * SHORT_S):
        policy.run(graph.extent, take, seconds)
        assert graph.is_short(policy)
    assert cpu_reads[0] == 2
    policy.run(graph.extent, take, SHORT_S / 10)  # it was disturbed
    policy.run(graph.extent, take, SHORT_S / 10)
    assert cpu_reads[0] == 4
    for _ in range(2):  # it has become longer
        policy.run(graph.extent, take, 2 * SHORT_S)
    assert not graph.is_short(policy)


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
    policy, graph = RunPolicy(), Graph()
    for _ in range(2):  # the first may have loaded something
        policy.run(graph.extent, take, 2 * SHORT_S)
    assert cpu_reads[0] == 4
    for _ in range(32):
        policy.run(graph.extent, take, 2 * SHORT_S)
        assert not graph.is_short(policy)
    assert cpu_reads[0] == 8
    for _ in range(16):  # it has become shorter
        policy.run(graph.extent, take, SHORT_S / 10)
    assert graph.is_short(policy)
    assert runs[0] == 50


def test_not_all_graphs_are_remembered():
    policy, graph = RunPolicy(), Graph()
    for elements in range(5000):
        policy.took((graph.extent[0], elements), 0.0, 0.0)
    assert len(policy._seconds) <= 1024
