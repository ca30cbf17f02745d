"""The protocol of a pass alone: lists of events, and what it has to say to each. The simulation tests it as a whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arpc.autograd.nodes import RecvRecord
from arpc.autograd.passes.messages import NOTHING_LIVE, Parcel
from arpc.autograd.passes.plan import Edge, Plan, Send
from arpc.autograd.passes.protocol import PassProtocol, Run
from arpc.errors import AutogradError
from tests.autograd.passes.test_plan import Leaf, Node, Recv
from tests.autograd.simulation import Program, check_programs


class Sums:
    """Gradients, which are texts here."""

    def __init__(self) -> None:
        self.found: dict[Edge, str] = {}

    def add(self, edge: Edge, gradient: str) -> None:
        self.found[edge] = self.found.get(edge, "") + gradient

    def take_recv(self, node: Any, count: int) -> list[str] | None:
        assert count == 1
        gradient = self.found.pop((node, 0), None)
        return None if gradient is None else [gradient]


class Part:
    """A worker in a pass. Sends: message id to destination and the nodes that its tensors came from."""

    def __init__(
        self,
        sends: dict[int, tuple[int, list[Node]]],
        roots: list[Node] | None = None,
        *,
        me: int = 0,
        cutoff: int = 1 << 30,
        **more: Any,
    ) -> None:
        made = {number: Send([(node, 0) for node in nodes], None, to, number) for number, (to, nodes) in sends.items()}
        edges = None if roots is None else [(node, 0) for node in roots]
        plan = Plan(made, edges, cutoff, leaf_class=Leaf, recv_class=Recv)
        assert plan.walk(1 << 30)
        self.sums = Sums()
        self.protocol = PassProtocol(me, plan, self.sums, 1, **more)
        if edges is not None:
            self.protocol.enter_roots([(edge, "g") for edge in edges])

    def run(self) -> list[Run]:
        """Run all that is ready; the gradient of each target is what came in, joined."""
        runs = []
        while (run := self.protocol.next_run()) is not None:
            runs.append(run)
            total = "".join(gradient for _, gradient in run.entering)
            self.protocol.ran(run, [(edge, total) for region in run.regions for edge in region.targets])
        return runs


def recv(message_id: int, sender: int, stamp: int = 0) -> Recv:
    return Recv(stamp, message_id=message_id, sender=sender)


def test_a_request_and_its_reply_take_one_parcel_each_way():
    x, result, argument = Leaf(), recv(2, 1, stamp=2), recv(1, 0, stamp=1)
    caller = Part({1: (1, [x])}, [Node(result)])
    callee = Part({2: (0, [Node(argument)])}, me=1, cutoff=2)
    assert len(caller.run()) == 1
    ((to, parcel),) = caller.protocol.post()
    assert (to, parcel) == (1, Parcel([(2, ["g"])], True, [], (1, 1)))
    caller.protocol.sent()
    assert not caller.protocol.is_done
    callee.protocol.received(0, parcel)
    callee.run()
    ((to, back),) = callee.protocol.post()
    assert (to, back) == (0, Parcel([(1, ["g"])], True, []))
    assert callee.protocol.is_done
    caller.protocol.acknowledged()
    caller.protocol.received(1, back)
    assert caller.run() == []
    assert caller.protocol.post() == []
    assert caller.protocol.is_done
    assert caller.sums.found == {(x, 0): "g"}
    assert caller.protocol.used == [1]


def test_a_long_run_is_cut_and_its_first_gradients_leave_early():
    """Six calls of another worker, each with a node here; the other gets the gradients of two at a time."""
    results = [recv(10 + number, 1, stamp=2) for number in range(6)]
    sends = {number: (1, [Node(results[number])]) for number in range(6)}
    part = Part(sends, me=0, cutoff=100)
    part.protocol.received(1, Parcel([(number, ["g"]) for number in range(6)], is_first=True, ids=list(range(6))))
    posted = []
    while (run := part.protocol.next_run(2)) is not None:
        assert len(run.regions) == 2
        part.protocol.ran(run, [(edge, "g") for region in run.regions for edge in region.targets])
        if part.protocol.is_cut:
            posted += part.protocol.post()
            part.protocol.sent()
    posted += part.protocol.post()
    assert [(to, [number for number, _ in parcel.gradients]) for to, parcel in posted] == [
        (1, [10, 11]),
        (1, [12, 13]),
        (1, [14, 15]),
    ]
    assert [(parcel.is_first, parcel.ids) for _, parcel in posted] == [
        (True, [12, 13, 14, 15]),
        (False, []),
        (False, []),
    ]


def test_regions_that_lead_into_each_other_run_together():
    shared, x = Node(Leaf()), Leaf()
    part = Part({1: (1, [shared]), 2: (1, [Node(shared)]), 3: (1, [Node(x)])}, cutoff=100)
    part.protocol.received(1, Parcel([(number, ["g"]) for number in (1, 2, 3)], is_first=True, ids=[1, 2, 3]))
    run = part.protocol.next_run(1)
    assert run is not None
    assert len(run.regions) == 3
    assert not part.protocol.is_cut


def test_what_a_first_parcel_does_not_list_gets_nothing():
    part = Part({1: (1, [Leaf()]), 2: (1, [Leaf()]), 3: (2, [Leaf()])})
    part.protocol.received(1, Parcel(is_first=True, ids=[2]))
    assert not part.protocol.is_done
    part.protocol.received(1, Parcel(ids=[2]))
    part.protocol.received(2, NOTHING_LIVE)
    part.run()
    assert part.protocol.is_done
    assert part.protocol.used == []


def test_a_first_parcel_that_is_overtaken_takes_nothing_back():
    x, y = Leaf(), Leaf()
    part = Part({1: (1, [x]), 2: (1, [y])})
    part.protocol.received(1, Parcel([(1, ["g"])]))
    part.protocol.received(1, Parcel(is_first=True, ids=[1, 2]))
    part.protocol.received(1, Parcel([(2, ["h"])]))
    part.run()
    assert part.sums.found == {(x, 0): "g", (y, 0): "h"}
    assert part.protocol.is_done


def test_a_parcel_that_was_received_keeps_no_gradients():
    x = Leaf()
    part = Part({1: (1, [x])})
    parcel = Parcel([(1, ["g"])])
    part.protocol.received(1, parcel)
    assert not parcel.gradients
    assert part.sums.found == {(x, 0): "g"}


def test_messages_to_oneself_need_no_parcel():
    x = Leaf()
    part = Part({1: (0, [x]), 2: (0, [Leaf()])}, [Node(recv(1, 0, stamp=1))])
    part.run()
    assert part.protocol.post() == []
    assert part.protocol.is_done
    assert part.sums.found == {(x, 0): "g"}


def test_a_worker_that_was_not_heard_from_is_written_to_once():
    part = Part({1: (1, [Leaf()]), 2: (1, [Leaf()])})
    assert part.run() == []
    assert part.protocol.post() == [(1, Parcel([], True, [], (2, 2)))]
    assert part.protocol.post() == []


@pytest.mark.parametrize(("asks", "is_answered"), [((1, 9), False), ((2, 9), True), ((1, 4), True)])
def test_a_worker_that_asks_for_more_than_is_open_is_answered_at_once(asks, is_answered):
    part = Part({7: (2, [recv(5, 1)])}, announced_by={2})
    part.protocol.received(1, Parcel(is_first=True, asks=asks))
    part.run()
    assert part.protocol.post() == ([(1, Parcel([], True, [5]))] if is_answered else [])


def test_a_worker_that_was_written_to_is_not_answered_again():
    part = Part({7: (2, [recv(5, 1)])}, announced_by={2}, announced_to={1})
    part.protocol.received(1, Parcel(is_first=True, asks=(2, 9)))
    assert part.protocol.post() == []


def test_gradients_for_an_unknown_message_are_an_error():
    for sends in ({}, {1: (1, [Leaf()])}):
        part = Part(sends)
        with pytest.raises(KeyError, match="7"):
            part.protocol.received(1, Parcel([(7, ["g"])]))


def test_sends_after_the_cutoff_get_nothing_and_are_not_announced():
    unused, used = recv(8, 2, stamp=9), recv(4, 1, stamp=3)
    part = Part({5: (1, [Node(unused)])}, [Node(used)])
    part.run()
    assert part.protocol.post() == [(1, Parcel([(4, ["g"])], True, []))]


def test_a_recv_is_answered_for_when_all_that_leads_to_it_has_run():
    received = recv(3, 1, stamp=9)
    part = Part({5: (2, [Node(received)]), 6: (2, [Node(received)])}, cutoff=9, announced_by={2})
    part.protocol.received(2, Parcel([(6, ["g"])]))
    part.run()
    assert part.protocol.post() == []
    part.protocol.received(2, Parcel([(5, ["h"])]))
    part.run()
    assert part.protocol.post() == [(1, Parcel([(3, ["gh"])], True, []))]


def test_a_region_that_leads_to_no_recv_waits_for_the_one_it_leads_into():
    shared = Node(recv(3, 1))
    part = Part({5: (2, [shared]), 6: (2, [Node(shared)])}, announced_by={2})
    part.protocol.received(2, Parcel([(6, ["g"])]))
    assert part.run() == []
    part.protocol.received(2, Parcel([(5, ["h"])]))
    (run,) = part.run()
    assert {region.message_id for region in run.regions} == {5, 6}
    assert not run.may_cross


def test_one_that_leads_to_a_recv_does_not_wait():
    shared, received = Node(Leaf()), recv(3, 1)
    part = Part({5: (2, [shared]), 6: (2, [Node(shared, received)])}, announced_by={2})
    part.protocol.received(2, Parcel([(6, ["g"])]))
    (run,) = part.run()
    assert run.may_cross
    assert part.protocol.post() == [(1, Parcel([(3, ["g"])], True, []))]


def test_a_graph_that_another_pass_freed_is_an_error_only_if_gradients_get_there():
    received = recv(3, 1, stamp=1)
    received.record.spent_by = 0
    part = Part({5: (2, [Node(received)])}, announced_by={2})
    part.protocol.received(2, Parcel([(5, ["g"])]))
    with pytest.raises(AutogradError, match="second time"):
        part.run()
    part = Part({5: (2, [Node(received)])}, announced_by={2})
    part.protocol.received(2, Parcel(ids=[5]))
    part.run()
    assert part.protocol.post() == [(1, Parcel([], True, []))]


def test_records_are_told_apart_by_identity():
    assert RecvRecord(1, 1, 1) != RecvRecord(1, 1, 1)


@pytest.mark.parametrize("first", range(0, 600, 150))
def test_random_programs_equal_one_process(first):
    results = check_programs(150, first)
    assert results.total() == 150


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_programs_made_step_by_step_equal_one_process(dice):
    """Hypothesis decides each step, so it finds a small program where one fails."""
    torch.manual_seed(0)
    assert Program(-1, dice).check()
