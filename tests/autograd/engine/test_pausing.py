"""The local engine alone: gradients come in any order, each node runs once."""

from __future__ import annotations

import random
import threading
import weakref
from collections import Counter

import numpy as np
import pytest
import torch

from arpc.autograd import fallback
from arpc.autograd.accumulation import LeafGradients
from arpc.autograd.engine import RegionEngine, Source
from arpc.autograd.fallback import GroupEngine, choose_engine, pausing_works
from arpc.autograd.nodes import RecvRecord, attach_recv, attach_send
from arpc.errors import AutogradError


class Graph:
    """A random graph with some sends, some recvs, and hooks that are not linear."""

    def __init__(self, seed: int, *, with_hooks: bool = True) -> None:
        dice = random.Random(seed)
        self.leaves = [torch.full((3,), float(number + 1), requires_grad=True) for number in range(3)]
        self.records = [RecvRecord(number, 1, 1) for number in range(2)]
        self.received = [attach_recv([torch.full((3,), 2.0)], record)[0] for record in self.records]
        self.runs: Counter[str] = Counter()
        values = [*self.leaves, *self.received]
        for number in range(15):
            first, second = dice.choice(values), dice.choice(values)
            value = first + 2 * second if dice.random() < 0.7 else first * 3 - second
            name = str(number)
            value.grad_fn.register_hook(lambda *_, name=name: self.runs.update([name]))
            if with_hooks and dice.random() < 0.4:
                value.register_hook(lambda gradient: torch.remainder(gradient * 5 + 1, 17))
            values.append(value)
        if with_hooks:
            self.leaves[0].register_hook(lambda gradient: torch.remainder(gradient + 3, 13))
        self.sent = [dice.choice(values[5:]) for _ in range(4)]
        self.root = values[-1].sum()
        self.order = dice.sample(range(1, 5), 4)
        self.given = [torch.full((3,), float(number)) if dice.random() < 0.7 else None for number in range(4)]

    def run(self, engine_class):
        sources = [Source([(self.root.grad_fn, self.root.output_nr)], None)]
        sources += [Source.of_send(attach_send([value])) for value in self.sent]
        engine = engine_class(sources, retain_graph=False)
        while not engine.walk(4):
            pass
        engine.resolve(0, [torch.ones(())])
        engine.run()
        for number in self.order:
            given = self.given[number - 1]
            engine.resolve(number, None if given is None else [given])
            engine.run()
        assert engine.has_run_all
        engine.close()
        heard = {record: gradients[0] for record, gradients in engine.delivered}
        assert heard.keys() | set(engine.silent) == set(engine.live)
        assert heard.keys().isdisjoint(engine.silent)
        return engine.leaves.take(), heard

    def reference(self):
        """The same in one go, by torch's own backward."""
        outputs = [self.root, *[value for value, given in zip(self.sent, self.given, strict=True) if given is not None]]
        given = [torch.ones(()), *[gradient for gradient in self.given if gradient is not None]]
        found = torch.autograd.grad(outputs, [*self.leaves, *self.received], given, allow_unused=True)
        return found[:3], found[3:]


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_gradients_and_runs_are_those_of_one_backward(start):
    for seed in range(start, start + 50):
        graph = Graph(seed)
        leaves, heard = graph.run(RegionEngine)
        again = Graph(seed)
        expected_leaves, expected_heard = again.reference()
        assert graph.runs == again.runs, seed
        for leaf, gradient in zip(graph.leaves, expected_leaves, strict=True):
            assert (leaf in leaves) == (gradient is not None), seed
            assert gradient is None or torch.equal(leaves[leaf], gradient), seed
        for record, gradient in zip(graph.records, expected_heard, strict=True):
            assert (record in heard) == (gradient is not None), seed
            assert gradient is None or torch.equal(heard[record], gradient), seed


def test_the_fallback_has_the_same_gradients():
    for seed in range(100):
        graph = Graph(seed, with_hooks=False)
        leaves, heard = graph.run(GroupEngine)
        expected_leaves, expected_heard = Graph(seed, with_hooks=False).reference()
        for leaf, gradient in zip(graph.leaves, expected_leaves, strict=True):
            assert (leaf in leaves) == (gradient is not None), seed
            assert gradient is None or torch.equal(leaves[leaf], gradient), seed
        for record, gradient in zip(graph.records, expected_heard, strict=True):
            assert (record in heard) == (gradient is not None), seed
            assert gradient is None or torch.equal(heard[record], gradient), seed


def test_torch_lets_itself_be_paused():
    assert pausing_works()
    assert choose_engine() is RegionEngine


def test_a_torch_that_does_not_is_noticed(monkeypatch, caplog):
    def broken(*_, **__):
        raise RuntimeError("no such thing")

    monkeypatch.setattr("arpc.autograd.engine.run_backward", broken)
    pausing_works.cache_clear()
    try:
        assert choose_engine() is GroupEngine
        assert "more than once" in caplog.text
    finally:
        monkeypatch.undo()
        pausing_works.cache_clear()
    assert fallback.choose_engine() is RegionEngine


def test_the_first_node_of_a_thread_does_not_stop_a_pause():
    # its place in the engine's queue is that of a barrier
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    early, late = (y * 3).sum(), y * 5
    early.grad_fn._set_sequence_nr(0)
    sources = [Source([(early.grad_fn, 0)], None), Source.of_send(attach_send([late]))]
    engine = RegionEngine(sources, retain_graph=False)
    assert engine.walk(100)
    engine.resolve(0, [torch.ones(())])
    engine.run()
    engine.resolve(1, [torch.ones(2)])
    engine.run()
    assert engine.leaves.take()[x].tolist() == [16.0, 16.0]


def test_what_is_shared_with_other_runs_is_not_taken_for_its_own():
    # a parameter with a hook, and a node at the border, met by another run while this one is under way
    x, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    weight.register_hook(lambda gradient: None)
    y = x * 2
    shared = y * 3

    def engine_over(factor, value):
        root = (value * factor).sum() + (shared * factor).sum()
        sources = [Source([(root.grad_fn, 0)], None), Source.of_send(attach_send([y]))]
        engine = RegionEngine(sources, retain_graph=True)
        assert engine.walk(100)
        engine.resolve(0, [torch.ones(())])
        return engine

    def finish(engine):
        engine.resolve(1, [torch.ones(2)])
        engine.run()
        gradients = engine.leaves.take()
        return gradients[weight].tolist(), gradients[x].tolist()

    class Meanwhile(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            thread = threading.Thread(target=other.run)
            thread.start()
            thread.join(30)
            return gradient

    other = engine_over(5, weight * 1)
    this = engine_over(7, Meanwhile.apply(weight * 1))
    this.run()
    assert finish(this) == ([7.0, 7.0], [44.0, 44.0])
    assert finish(other) == ([5.0, 5.0], [32.0, 32.0])


def test_a_graph_that_was_freed_says_so():
    record = RecvRecord(1, 1, 1)
    (received,) = attach_recv([torch.ones(2)], record)
    root = received.sum()

    def walk():
        engine = RegionEngine([Source([(root.grad_fn, 0)], None)], retain_graph=False)
        assert engine.walk(100)
        engine.resolve(0, [torch.ones(())])
        engine.run()
        engine.close()

    walk()
    with pytest.raises(AutogradError, match="second time"):
        walk()


def test_gradients_that_somebody_else_has_are_copied():
    x, y = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    kept = []
    x.register_hook(kept.append)
    root = (x + y).sum() + y.t().sum()
    engine = RegionEngine([Source([(root.grad_fn, 0)], None)], retain_graph=False)
    assert engine.walk(100)
    engine.resolve(0, [torch.ones(())])
    engine.run()
    gradients = engine.leaves.take()
    gradients[x].zero_()
    assert kept[0].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert gradients[y].tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert gradients[x].stride() == x.stride()


def test_a_gradient_that_nobody_else_has_is_not_copied():
    x = torch.ones(1000, requires_grad=True)
    addresses = []
    x.register_hook(lambda gradient: addresses.append(gradient.data_ptr()))
    root = (x * torch.full((1000,), 3.0)).sum()
    engine = RegionEngine([Source([(root.grad_fn, 0)], None)], retain_graph=False)
    assert engine.walk(100)
    engine.resolve(0, [torch.ones(())])
    engine.run()
    assert engine.leaves.take()[x].data_ptr() == addresses[0]


def test_sums_change_no_gradient_that_was_added():
    leaf = torch.zeros(3, requires_grad=True)
    parts = [torch.full((3,), float(number)) for number in range(1, 5)]
    gradients = LeafGradients()
    for part in parts:
        gradients.add(leaf, part)
    gradients.add(leaf, torch.sparse_coo_tensor([[0]], [10.0], (3,), check_invariants=True))
    gradients.add(leaf, parts[0])
    assert gradients.take()[leaf].tolist() == [21.0, 11.0, 11.0]
    assert [part.tolist() for part in parts] == [[float(number)] * 3 for number in range(1, 5)]


class Marked(torch.Tensor):
    """A tensor of another class."""


@pytest.mark.parametrize(
    "make", [lambda late: [late], lambda late: [late.as_subclass(Marked)], lambda late: [late] * 20]
)
def test_whatever_was_sent_the_engine_can_pause_there(make):
    x = torch.ones(2, requires_grad=True)
    shared = x * 2
    early, late = (shared * 3).sum(), shared * 5
    sent = make(late)
    sources = [Source([(early.grad_fn, 0)], None), Source.of_send(attach_send(sent))]
    assert len(sources[1].edges) == len(sent)
    runs = []
    shared.grad_fn.register_hook(lambda *_: runs.append(None))
    engine = RegionEngine(sources, retain_graph=False)
    assert engine.walk(100)
    engine.resolve(0, [torch.ones(())])
    engine.run()
    assert not runs
    engine.resolve(1, [torch.ones(2)] * len(sent))
    engine.run()
    assert len(runs) == 1
    assert engine.leaves.take()[x].tolist() == [6.0 + 10.0 * len(sent)] * 2


def test_what_was_sent_keeps_no_memory():
    memory = np.ones(2, np.float32)
    (tensor,) = attach_recv([torch.from_numpy(memory)], RecvRecord(1, 2, 1))
    node = tensor.grad_fn
    gone = weakref.ref(memory)
    source = Source.of_send(attach_send([tensor]))
    del tensor, memory
    assert gone() is None
    assert list(source.edges) == [(node, 0)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_recv_leads_to_one_node_however_many_tensors_came(count):
    received = attach_recv([torch.ones(2) for _ in range(count)], RecvRecord(1, 1, count))
    (node,) = {tensor.grad_fn for tensor in received}
    assert len(node.next_functions) != 2  # or the walk over a large graph would take it for another node
