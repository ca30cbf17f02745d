"""Random programs over simulated workers: real graphs, plans, protocol and engine; a network that reorders and loses.

    python -m tests.autograd.simulation [programs] [first seed]

Workers are objects of one process, and messages wait in a queue until their time has come. Each program is compared
with one process that runs it: gradients, how often each node and hook ran, that passes end, and what failures leave.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from arpc.autograd.contexts import AutogradContext
from arpc.autograd.engine.gradient_sums import GradientSums
from arpc.autograd.engine.run import run_regions
from arpc.autograd.nodes import RecvRecord, attach_recv, attach_send
from arpc.autograd.passes.messages import NOTHING_LIVE, Parcel, PassHeading, pack_parcel, unpack_parcel
from arpc.autograd.passes.plan import Plan, Send
from arpc.autograd.passes.protocol import PassProtocol

Message = tuple[int, int, int, list[Tensor]]


class Part:
    """The part of one worker in a pass."""

    def __init__(self, worker: Worker, heading: PassHeading | None, parent: tuple[int, int] | None, plan: Plan):
        self.worker = worker
        while not plan.walk(7):
            pass
        self.plan = plan
        self.parent = parent
        self.is_over = False
        self.is_busy = False
        """Whether a thread runs the next slice."""
        self.inbox: list[tuple[int, Parcel]] = []
        self.sums = GradientSums()
        self.heading = heading or PassHeading(
            0, worker.net.pass_id, worker.net.retains, plan.cutoff, sorted(worker.failed)
        )
        retain_graph = self.heading.retain_graph
        self.protocol = PassProtocol(worker.number, plan, self.sums, self.heading.pass_id, retain_graph=retain_graph)

    def receive(self, sender: int, parcel: Parcel | None, answering: tuple[int, int] | None = None) -> None:
        if parcel is not None:
            self.inbox.append((sender, parcel))
        if not self.is_busy:
            self.advance(answering)
        elif answering is not None:
            self.answer_at_once(answering)

    def answer_at_once(self, answering: tuple[int, int]) -> None:
        net, (peer, call) = self.worker.net, answering
        net.transmit(self.worker.number, peer, "answer", call, self.heading.pass_id, None, None)

    def runs_in_thread(self, answering: tuple[int, int] | None) -> bool:
        """Post the gradients of a slice. The next one may take its time, in which parcels arrive."""
        for peer, parcel in self.protocol.post():
            self.send(peer, parcel)
        self.is_busy = self.worker.net.random.random() < 0.5
        if self.is_busy:
            self.worker.net.later(3 * self.worker.net.random.random(), self.resume)
            if answering is not None:
                self.answer_at_once(answering)
        return self.is_busy

    def resume(self) -> None:
        self.is_busy = False
        if not self.is_over:
            self.advance()

    def advance(self, answering: tuple[int, int] | None = None) -> None:
        worker, protocol, net = self.worker, self.protocol, self.worker.net
        try:
            while True:
                while self.inbox:
                    protocol.received(*self.inbox.pop(0))
                if protocol.is_cut and self.runs_in_thread(answering):
                    return
                run = protocol.next_run(net.nodes_per_run)
                if run is None:
                    break
                net.runs += 1
                net.running = self.heading.pass_id
                protocol.ran(run, run_regions(run, self.plan, self.heading.retain_graph))
        except Exception as error:  # noqa: BLE001 - a hook of the program
            self.fail(f"{worker.number}: {error}", answering)
            return
        riding = for_parent = None
        for peer, parcel in protocol.post():
            if answering is not None and peer == answering[0]:
                riding = parcel
            elif self.parent is not None and peer == self.parent[0]:
                for_parent = parcel
            else:
                self.send(peer, parcel)
        if for_parent is not None and not protocol.is_done:
            self.send(self.parent[0], for_parent)
            for_parent = None
        if answering is not None:
            worker.net.transmit(worker.number, answering[0], "answer", answering[1], self.heading.pass_id, riding, None)
        if protocol.is_done and not self.is_over:
            self.is_over = True
            worker.context.commit(self.heading.pass_id, self.sums.take_leaves(), protocol.announced_to)
            if self.parent is None:
                worker.net.ended.append(None)
            else:
                peer, call = self.parent
                worker.net.transmit(worker.number, peer, "answer", call, self.heading.pass_id, for_parent, None)

    def send(self, peer: int, parcel: Parcel) -> None:
        self.protocol.sent()
        self.worker.net.transmit(self.worker.number, peer, "parcel", parcel, self.heading)

    def fail(self, error: str, answering: tuple[int, int] | None = None) -> None:
        """Errors go to the parent; the worker that began the pass tells everyone."""
        if self.is_over:
            return
        self.is_over = True
        worker, pass_id = self.worker, self.heading.pass_id
        if answering is not None:
            worker.net.transmit(worker.number, answering[0], "answer", answering[1], pass_id, None, None)
        if self.parent is not None:
            worker.net.transmit(worker.number, self.parent[0], "answer", self.parent[1], pass_id, None, error)
            return
        worker.abort(pass_id)
        for other in worker.net.workers:
            if other is not worker:
                worker.net.transmit(worker.number, other.number, "abort", pass_id)
        worker.net.ended.append(error)


class Worker:
    def __init__(self, net: Net, number: int) -> None:
        self.net = net
        self.number = number
        self.context = AutogradContext(0)
        self.part: Part | None = None
        self.is_lost = False

    @property
    def failed(self) -> frozenset[int]:
        return self.context.aborted_passes

    # -- forward, as `Recorder` does it

    def send(self, to: int, tensors: list[Tensor]) -> Message:
        context, message_id = self.context, next(self.net.message_ids)
        context.clock += 1
        node = attach_send(tensors)
        context.sends[message_id] = Send(node.next_functions[1:], node, to, context.clock)
        return message_id, self.number, context.clock, [tensor.detach().clone() for tensor in tensors]

    def receive(self, message: Message) -> tuple[Tensor, ...]:
        message_id, sender, stamp, tensors = message
        self.context.clock = max(self.context.clock, stamp) + 1
        return attach_recv([tensor.data for tensor in tensors], RecvRecord(message_id, sender, len(tensors), stamp))

    # -- backward, as `BackwardPass` and `AutogradService` do it

    def backward(self, roots: list[Tensor]) -> None:
        edges = [(root.grad_fn, root.output_nr) for root in roots]
        self.part = Part(self, None, None, Plan(self.context.sends, edges))
        self.part.protocol.enter_roots([(edge, torch.ones_like(root)) for edge, root in zip(edges, roots, strict=True)])
        self.part.advance()

    def on_parcel(self, sender: int, call: int, parcel: Parcel, heading: PassHeading) -> None:
        pass_id = heading.pass_id
        for failed in heading.failed:
            if failed not in self.failed:
                self.abort(failed)
        if pass_id in self.failed:
            self.net.transmit(self.number, sender, "answer", call, pass_id, None, "aborted")
            return
        part = self.part
        if part is None or part.heading.pass_id != pass_id:
            part = self.part = Part(self, heading, (sender, call), Plan(self.context.sends, cutoff=heading.cutoff))
            part.receive(sender, parcel)
        elif part.is_over:
            answer = None if sender in self.context.last_announced_to else NOTHING_LIVE
            self.net.transmit(self.number, sender, "answer", call, pass_id, answer, None)
        else:
            part.receive(sender, parcel, (sender, call))

    def on_answer(self, sender: int, pass_id: int, parcel: Parcel | None, error: str | None) -> None:
        part = self.part
        if part is None or part.heading.pass_id != pass_id or part.is_over:
            return
        if error is not None:
            part.fail(error)
            return
        part.protocol.acknowledged()
        part.receive(sender, parcel)

    def abort(self, pass_id: int) -> None:
        self.context.roll_back(pass_id)
        if self.part is not None and self.part.heading.pass_id == pass_id:
            self.part.is_over = True

    def peer_lost(self, peer: int) -> None:
        part = self.part
        if part is not None and not part.is_over:
            part.fail(f"{peer} lost")


class Net:
    """The network: messages in a queue by the time they arrive."""

    def __init__(self, workers: int, dice: random.Random) -> None:
        self.random = dice
        self.nodes_per_run = dice.choice((math.inf, 1, 2, 5))
        self.workers = [Worker(self, number) for number in range(workers)]
        self.message_ids = itertools.count(1)
        self.calls = itertools.count(1)
        self.order = itertools.count()
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.now = 0.0
        self.pass_id = 0
        self.running = 0
        """The pass whose nodes ran last: a worker that has not heard that one has failed may still run it."""
        self.retains = False
        self.ended: list[str | None] = []
        self.runs = self.messages = 0

    def later(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now + delay, next(self.order), event))

    def transmit(self, sender: int, to: int, kind: str, *content: Any) -> None:
        self.messages += kind != "abort"
        delay = self.random.choice((1, 1, 2, 5, 20)) * self.random.random()
        if kind == "abort":
            delay *= self.random.choice((1, 50))  # the news of a failure is overtaken
        elif self.random.random() < 0.05:
            delay *= 20
        if kind == "parcel":
            parcel, heading = content
            packed, call = pack_parcel(parcel, heading), next(self.calls)
            self.later(delay, lambda: self.deliver_parcel(sender, to, call, packed))
        elif kind == "answer":
            _, pass_id, parcel, error = content
            packed = None if parcel is None else pack_parcel(parcel)
            self.later(delay, lambda: self.deliver_answer(sender, to, pass_id, packed, error))
        else:
            self.later(delay, lambda: self.workers[to].is_lost or self.workers[to].abort(content[0]))

    def deliver_parcel(self, sender: int, to: int, call: int, packed: list[Any]) -> None:
        worker = self.workers[to]
        if worker.is_lost:
            self.workers[sender].peer_lost(to)
            return
        parcel, heading = unpack_parcel(packed)
        assert heading is not None
        worker.on_parcel(sender, call, parcel, heading)

    def deliver_answer(self, sender: int, to: int, pass_id: int, packed: list[Any] | None, error: str | None) -> None:
        if not self.workers[to].is_lost:
            self.workers[to].on_answer(sender, pass_id, None if packed is None else unpack_parcel(packed)[0], error)

    def lose(self, number: int) -> None:
        self.workers[number].is_lost = True
        for other in self.workers:
            if not other.is_lost:
                self.later(3, lambda other=other: other.peer_lost(number))

    def go(self, *, until_ended: bool = False) -> None:
        while self.queue and not (until_ended and self.ended):
            self.now, _, event = heapq.heappop(self.queue)
            event()


class Drop(torch.autograd.Function):
    """Gives its second input no gradient."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.set_materialize_grads(False)
        return a + b

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


Pair = tuple[Tensor, Tensor]
"""A value of the simulation, and the same in one process."""


class Program:
    """Values that are computed, sent and received at random, with hooks that are not linear, and a pass over them."""

    def __init__(self, seed: int, dice: random.Random | None = None) -> None:
        """``dice``: what decides, if not the seed."""
        self.seed = seed
        self.dice = dice = dice or random.Random(seed)
        self.net = Net(dice.randint(2, 5), random.Random(dice.getrandbits(32)))
        self.count = len(self.net.workers)
        steps = dice.choice((5, 12, 30, 60))
        self.is_in_place = dice.random() < 0.25
        self.drops = dice.random() < 0.2
        self.has_hooks = dice.random() < 0.6
        self.runs: dict[int, list[int]] = {}
        """How often each node and hook ran: in the simulation, and in one process."""
        self.hooks: list[int] = []
        self.raising: int | None = None
        self.flights: list[tuple[int, Message, list[Tensor]]] = []
        self.values: list[list[Pair]] = [[] for _ in self.net.workers]
        self.leaves: list[list[Pair]] = [[] for _ in self.net.workers]
        for number in range(self.count):
            for _ in range(dice.randint(1, 3)):
                mine = torch.randn(3, dtype=torch.float64, requires_grad=True)
                pair = mine, mine.detach().clone().requires_grad_()
                self.leaves[number].append(pair)
                self.hook(pair)
                self.values[number].append(pair)
        self.roots: list[Pair] = []
        at = dice.choice((steps, steps, dice.randint(1, steps)))
        for step in range(steps):
            if step == at:
                self.pick_roots()
            self.act()
        if not self.roots:
            self.pick_roots()

    def hook(self, pair: Pair) -> None:
        if not self.has_hooks or self.dice.random() >= 0.2:
            return
        key = len(self.runs)
        self.runs[key] = [0, 0]
        self.hooks.append(key)
        for side, tensor in enumerate(pair):

            def run(gradient: Tensor | None, side: int = side) -> Tensor | None:
                self.ran(key, side, gradient is not None)  # torch calls hooks of unused outputs with None
                if self.raising == key and side == 0:
                    raise ValueError("boom")
                return None if gradient is None else torch.tanh(gradient) + 0.1

            tensor.register_hook(run)

    def count_runs(self, pair: Pair) -> None:
        key = len(self.runs)
        self.runs[key] = [0, 0]
        for side, tensor in enumerate(pair):

            def run(_: Any, __: Any, side: int = side) -> None:
                self.ran(key, side)

            tensor.grad_fn.register_hook(run)

    def ran(self, key: int, side: int, is_counted: bool = True) -> None:
        """Count a run, but for those of a pass that has failed meanwhile."""
        if side == 1 or self.net.running == self.net.pass_id:
            self.runs[key][side] += is_counted

    def put(self, worker: int, pair: Pair) -> None:
        self.count_runs(pair)
        self.hook(pair)
        self.values[worker].append(pair)

    def recent(self, worker: int) -> Pair:
        have, dice = self.values[worker], self.dice
        if dice.random() < 0.8:
            return have[-1 - int(min(dice.expovariate(0.5), len(have) - 1))]
        return dice.choice(have)

    def act(self) -> None:
        dice = self.dice
        worker = dice.randrange(self.count)
        what = dice.random()
        if what < 0.4:
            self.compute(worker)
        elif what < 0.75 or not self.flights:
            to = dice.randrange(self.count)
            if to == worker and dice.random() < 0.7:
                to = (worker + 1) % self.count
            chosen = [self.recent(worker) for _ in range(dice.choice((1, 1, 1, 2, 3)))]
            message = self.net.workers[worker].send(to, [mine for mine, _ in chosen])
            if dice.random() < 0.95:
                self.flights.append((to, message, [other.clone() for _, other in chosen]))
            if self.flights and dice.random() < 0.6:
                self.deliver(len(self.flights) - 1)
        else:
            self.deliver(dice.randrange(len(self.flights)))

    def compute(self, worker: int) -> None:
        (a, ra), (b, rb) = self.recent(worker), self.recent(worker)
        kind = self.dice.choice(("add", "scale", "split", "mul", "sin", "in place", "drop"))
        if self.is_in_place and kind in {"mul", "sin"}:
            kind = "in place"
        if (kind == "in place" and not self.is_in_place) or (kind == "drop" and not self.drops):
            kind = "add"
        if kind == "add":
            self.put(worker, (a + b, ra + rb))
        elif kind == "scale":
            self.put(worker, (a * 0.5, ra * 0.5))
        elif kind == "mul":
            self.put(worker, (torch.tanh(a * b), torch.tanh(ra * rb)))
        elif kind == "sin":
            self.put(worker, (torch.sin(a), torch.sin(ra)))
        elif kind == "drop":
            self.put(worker, (Drop.apply(a, b), Drop.apply(ra, rb)))
        elif kind == "split":
            joined = torch.cat([a, b]), torch.cat([ra, rb])
            self.count_runs(joined)
            (p, q), (rp, rq) = (one.split_with_sizes([3, 3]) for one in joined)
            self.put(worker, (p * 1, rp * 1))
            self.put(worker, (q * 2, rq * 2))
        elif a.grad_fn is not None and a is not b:
            a.add_(b)
            ra.add_(rb)
            self.count_runs((a, ra))

    def deliver(self, number: int) -> None:
        to, message, others = self.flights.pop(number)
        for pair in zip(self.net.workers[to].receive(message), others, strict=True):
            self.hook(pair)
            self.values[to].append(pair)

    def pick_roots(self) -> None:
        """From the last values of worker 0."""
        have = self.values[0]
        for _ in range(self.dice.choice((1, 1, 2))):
            mine, other = have[-1 - int(min(self.dice.expovariate(0.4), len(have) - 1))]
            if self.is_in_place:
                self.roots.append(((mine * 3).sum(), (other * 3).sum()))
            else:
                self.roots.append(((mine * mine).sum(), (other * other).sum()))

    def run(self, *, retains: bool, is_drained: bool = True) -> str | None:
        net = self.net
        for _ in range(self.dice.randint(0, 3)):  # the forward goes on meanwhile, and messages of it arrive
            net.later(self.dice.random() * 30, self.act)
        net.pass_id += 1
        net.retains = retains
        net.ended.clear()
        net.workers[0].backward([mine for mine, _ in self.roots])
        net.go(until_ended=not is_drained)
        assert len(net.ended) == 1, (self.seed, "hangs" if not net.ended else "ends twice")
        return net.ended[0]

    def left(self) -> bool:
        return any(worker.context.gradients for worker in self.net.workers if not worker.is_lost)

    def check(self) -> str:
        """Run it, and compare; a word for what happened."""
        dice = self.dice
        retains = dice.random() < 0.4
        has_failed = False
        passes = 0
        if self.hooks and retains and dice.random() < 0.8:
            self.raising = dice.choice(self.hooks)
            is_drained = dice.random() < 0.5  # or the next pass begins while the news of the failure is under way
            error = self.run(retains=True, is_drained=is_drained)
            self.raising = None
            if error is None:
                passes = 1
            else:
                assert "boom" in error
                assert not (is_drained and self.left()), (self.seed, "left something")
                has_failed = True
                for counts in self.runs.values():
                    counts[0] = 0
        elif retains and dice.random() < 0.15 and self.count > 2:
            number = dice.randrange(1, self.count)
            self.net.later(dice.random() * 20, lambda: self.net.lose(number))
            if self.run(retains=True) is None:
                return "lost when it was over"
            assert not self.left(), (self.seed, "left something")
            return "lost"
        assert self.run(retains=retains) is None, self.seed
        passes += 1
        if passes == 1 and retains and dice.random() < 0.5:
            assert self.run(retains=True) is None, self.seed
            passes += 1
        for _ in range(passes):
            torch.autograd.backward([other for _, other in self.roots], retain_graph=True)
        self.compare(passes)
        return "failed, then right" if has_failed else "right"

    def compare(self, passes: int) -> None:
        for worker, leaves in zip(self.net.workers, self.leaves, strict=True):
            for mine, other in leaves:
                gradient = worker.context.gradients.get(mine)
                if gradient is None:
                    assert other.grad is None or (self.drops and not other.grad.any()), (self.seed, "missing")
                else:
                    assert other.grad is not None, self.seed
                    assert torch.allclose(gradient, other.grad, rtol=1e-9, atol=1e-12), self.seed
        for counts in self.runs.values():
            if self.drops:
                assert counts[0] <= passes, (self.seed, "ran twice")
            else:
                assert counts[0] == counts[1], (self.seed, counts)


def check_programs(count: int, first: int = 0) -> Counter[str]:
    results: Counter[str] = Counter()
    for seed in range(first, first + count):
        torch.manual_seed(seed)
        results[Program(seed).check()] += 1
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(dict(check_programs(*map(int, sys.argv[1:] or ["2000"]))))  # noqa: T201
