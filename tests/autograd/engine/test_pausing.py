"""The engine alone: gradients come in any order, each node runs once."""

from __future__ import annotations

import random
import threading
import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from arpc.autograd.engine import pausing
from arpc.autograd.engine.gradient_sums import GradientSums
from arpc.autograd.engine.run import run_regions
from arpc.autograd.nodes import RecvRecord, attach_recv, attach_send
from arpc.autograd.passes.messages import Parcel
from arpc.autograd.passes.plan import Plan, Send
from arpc.autograd.passes.protocol import PassProtocol
from arpc.errors import AutogradError


class LocalPart:
    """A pass on one worker that has roots, and messages to worker 1 whose gradients come when the test says so."""

    def __init__(self, roots: list[Tensor], sent: list[list[Tensor]], *, retain_graph: bool = False, pass_id: int = 1):
        edges = [(root.grad_fn, root.output_nr) for root in roots]
        sends = {}
        for number, tensors in enumerate(sent):
            node = attach_send(tensors)
            sends[number] = Send(node.next_functions[1:], node, 1, number)
        self.plan = plan = Plan(sends, edges)
        while not plan.walk(4):
            pass
        plan.cutoff = 1 << 30  # gradients of all sends may come
        self.sums = GradientSums()
        self.retains_graph = retain_graph
        self.protocol = PassProtocol(0, plan, self.sums, pass_id, retain_graph=retain_graph)
        self.protocol.enter_roots([(edge, torch.ones_like(root)) for edge, root in zip(edges, roots, strict=True)])
        self.heard: dict[int, Any] = {}
        """Gradients for messages of worker 1, None if there are none."""
        self.open: set[int] | None = None

    def run(self) -> None:
        while (run := self.protocol.next_run()) is not None:
            self.protocol.ran(run, run_regions(run, self.plan, self.retains_graph))
        for _, parcel in self.protocol.post():
            for message_id, gradients in parcel.gradients:
                self.heard[message_id] = gradients[0]
            if not parcel.is_first:
                self.heard.update(dict.fromkeys(parcel.ids))

    def resolve(self, number: int, gradients: list[Tensor | None] | None) -> None:
        parcel = Parcel(ids=[number]) if gradients is None else Parcel([(number, gradients)])
        self.protocol.received(1, parcel)
        self.run()


class Graph:
    """A random graph with some sends, some recvs, and hooks that are not linear."""

    def __init__(self, seed: int) -> None:
        dice = random.Random(seed)
        self.leaves = [torch.full((3,), float(number + 1), requires_grad=True) for number in range(3)]
        self.records = [RecvRecord(number, 1, 1) for number in range(2)]
        self.received = [attach_recv([torch.full((3,), 2.0)], record)[0] for record in self.records]
        self.runs: Counter[str] = Counter()
        values = [*self.leaves, *self.received]
        if dice.random() < 0.5:
            self.received[0].register_hook(lambda gradient: torch.remainder(gradient * 7 + 2, 19))
        for number in range(15):
            first, second = dice.choice(values), dice.choice(values)
            value = first + 2 * second if dice.random() < 0.7 else first * 3 - second
            name = str(number)
            value.grad_fn.register_hook(lambda *_, name=name: self.runs.update([name]))
            if dice.random() < 0.4:
                value.register_hook(lambda gradient: torch.remainder(gradient * 5 + 1, 17))
            values.append(value)
        self.leaves[0].register_hook(lambda gradient: torch.remainder(gradient + 3, 13))
        self.received[1].retain_grad()
        self.sent = [dice.choice(values[3:]) for _ in range(4)]
        self.root = values[-1].sum()
        self.order = dice.sample(range(4), 4)
        self.given = [torch.full((3,), float(number)) if dice.random() < 0.7 else None for number in range(4)]

    def run(self) -> tuple[dict[Tensor, Tensor], dict[int, Any]]:
        part = LocalPart([self.root], [[value] for value in self.sent])
        part.run()
        for number in self.order:
            given = self.given[number]
            part.resolve(number, None if given is None else [given])
        assert part.protocol.is_done
        return part.sums.take_leaves(), {number: found for number, found in part.heard.items() if found is not None}

    def reference(self) -> tuple[Any, Any]:
        """The same in one go, by torch's own backward."""
        outputs = [self.root, *[value for value, given in zip(self.sent, self.given, strict=True) if given is not None]]
        given = [torch.ones(()), *[gradient for gradient in self.given if gradient is not None]]
        found = torch.autograd.grad(outputs, [*self.leaves, *self.received], given, allow_unused=True)
        return found[:3], found[3:]


@pytest.mark.parametrize("start", range(0, 400, 100))
def test_gradients_and_runs_are_those_of_one_backward(start):
    for seed in range(start, start + 100):
        graph = Graph(seed)
        leaves, heard = graph.run()
        again = Graph(seed)
        expected_leaves, expected_heard = again.reference()
        assert graph.runs == again.runs, seed
        for leaf, gradient in zip(graph.leaves, expected_leaves, strict=True):
            assert (leaf in leaves) == (gradient is not None), seed
            assert gradient is None or torch.equal(leaves[leaf], gradient), seed
        for record, gradient in zip(graph.records, expected_heard, strict=True):
            assert (record.message_id in heard) == (gradient is not None), seed
            assert gradient is None or torch.equal(heard[record.message_id], gradient), seed
        kept, expected = graph.received[1].grad, again.received[1].grad
        assert kept is expected is None or torch.equal(kept, expected), seed


def test_torch_lets_itself_be_paused():
    pausing.check_pausing()


def test_a_torch_that_does_not_is_noticed(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(pausing, "run_backward", broken)
    pausing.check_pausing.cache_clear()
    try:
        with pytest.raises(AutogradError, match="does not let its engine be paused"):
            pausing.check_pausing()
    finally:
        monkeypatch.undo()
        pausing.check_pausing.cache_clear()
    pausing.check_pausing()


def test_the_first_node_of_a_thread_does_not_stop_a_pause():
    # its place in the engine's queue is that of a barrier
    x = torch.ones(2, requires_grad=True)
    (received,) = attach_recv([torch.ones(2)], RecvRecord(1, 1, 1))
    y = x * 2
    early, late = (y * received).sum(), y * 5
    early.grad_fn._set_sequence_nr(0)
    part = LocalPart([early], [[late]])
    part.run()
    assert part.heard[1].tolist() == [2.0, 2.0]
    part.resolve(0, [torch.ones(2)])
    assert part.sums.take_leaves()[x].tolist() == [12.0, 12.0]


def test_what_is_shared_with_other_runs_is_not_taken_for_its_own():
    # a parameter with a hook, and a node at the border, met by another run while this one is under way
    x, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    weight.register_hook(lambda gradient: None)
    y = x * 2
    shared = y * 3

    def part_over(factor, value):
        (received,) = attach_recv([torch.ones(())], RecvRecord(1, 1, 1))
        root = (value * factor).sum() + (shared * factor).sum() + received
        return LocalPart([root], [[y]], retain_graph=True)

    def finish(part):
        part.resolve(0, [torch.ones(2)])
        gradients = part.sums.take_leaves()
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

    other = part_over(5, weight * 1)
    this = part_over(7, Meanwhile.apply(weight * 1))
    this.run()
    assert finish(this) == ([7.0, 7.0], [44.0, 44.0])
    assert finish(other) == ([5.0, 5.0], [32.0, 32.0])


def test_a_graph_that_was_freed_says_so():
    (received,) = attach_recv([torch.ones(2)], RecvRecord(1, 1, 1))
    root = received.sum()
    LocalPart([root], [], pass_id=1).run()
    with pytest.raises(AutogradError, match="second time"):
        LocalPart([root], [], pass_id=2).run()


def test_a_graph_that_was_freed_does_no_harm_if_no_gradient_gets_there():
    (received,) = attach_recv([torch.ones(2)], RecvRecord(1, 1, 1))
    x = torch.ones(2, requires_grad=True)
    LocalPart([received.sum()], [], pass_id=1).run()
    part = LocalPart([(x * 2).sum()], [[received * 3]], pass_id=2)
    part.run()
    part.resolve(0, None)
    assert part.protocol.is_done
    assert part.sums.take_leaves()[x].tolist() == [2.0, 2.0]


class Marked(torch.Tensor):
    """A tensor of another class."""


@pytest.mark.parametrize(
    "make", [lambda late: [late], lambda late: [late.as_subclass(Marked)], lambda late: [late] * 20]
)
def test_whatever_was_sent_the_engine_can_pause_there(make):
    x = torch.ones(2, requires_grad=True)
    (received,) = attach_recv([torch.ones(2)], RecvRecord(1, 1, 1))
    shared = x * 2
    early, late = (shared * 3 * received).sum(), shared * 5
    sent = make(late)
    runs = []
    shared.grad_fn.register_hook(lambda *_: runs.append(None))
    part = LocalPart([early], [sent])
    assert len(part.plan.regions[0].send.edges) == len(sent)
    part.run()
    assert not runs
    part.resolve(0, [torch.ones(2)] * len(sent))
    assert len(runs) == 1
    assert part.sums.take_leaves()[x].tolist() == [6.0 + 10.0 * len(sent)] * 2


def test_what_was_sent_keeps_no_memory():
    memory = np.ones(2, np.float32)
    (tensor,) = attach_recv([torch.from_numpy(memory)], RecvRecord(1, 2, 1))
    node = tensor.grad_fn
    gone = weakref.ref(memory)
    send = attach_send([tensor])
    del tensor, memory
    assert gone() is None
    assert list(send.next_functions[1:]) == [(node, 0)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_recv_leads_to_one_node_however_many_tensors_came(count):
    received = attach_recv([torch.ones(2) for _ in range(count)], RecvRecord(1, 1, count))
    assert len({tensor.grad_fn for tensor in received}) == 1
