"""Plans alone, over graphs of the tests' own: every node once, each in the region of the earliest send."""

from __future__ import annotations

import random

import pytest

from arpc.autograd.nodes import RecvRecord
from arpc.autograd.passes.plan import Plan, Send


class Variable:
    """A leaf, as far as a plan looks at it."""

    requires_grad = True

    def __init__(self, *, is_hooked: bool = False) -> None:
        self._backward_hooks = {1: None} if is_hooked else None


class Node:
    def __init__(self, *children: Node | None) -> None:
        self.next_functions = tuple((child, 0) for child in children)


class Leaf(Node):
    def __init__(self, *, is_hooked: bool = False) -> None:
        super().__init__()
        self.variable = Variable(is_hooked=is_hooked)


class Recv(Node):
    def __init__(self, stamp: int = 0, *, is_hooked: bool = False, message_id: int = 0, sender: int = 1) -> None:
        super().__init__(None)
        self.record = RecvRecord(message_id, sender, 1, stamp)
        self.record.is_hooked = is_hooked


def make_plan(*sends: list[Node], roots: list[Node] | None = None, limit: int = 3, cutoff: int = 1 << 30) -> Plan:
    made = {number: Send([(node, 0) for node in nodes], None, 7, number + 1) for number, nodes in enumerate(sends)}
    edges = None if roots is None else [(node, 0) for node in roots]
    plan = Plan(made, edges, cutoff, leaf_class=Leaf, recv_class=Recv)
    while not plan.walk(limit):
        pass
    return plan


def test_a_node_belongs_to_the_earliest_send_that_reaches_it():
    leaf, recv = Leaf(), Recv()
    shared = Node(leaf, recv)
    first, second = Node(shared), Node(shared, leaf)
    plan = make_plan([first], [second])
    one, two = plan.regions
    assert plan.owners == {first: one, shared: one, second: two}
    assert two.touches == {one}
    assert not one.touches
    assert (one.waits, two.waits) == (2, 1)
    assert list(one.recvs) == [recv]
    assert not two.recvs
    assert set(one.targets) == {(leaf, 0), (recv, 0)}
    assert set(two.targets) == {(leaf, 0)}


def test_leaves_and_recvs_are_shared_without_making_a_border():
    leaf, recv = Leaf(), Recv()
    plan = make_plan([Node(leaf, recv)], [Node(leaf, recv)])
    assert [region.touches for region in plan.regions] == [set(), set()]
    assert [list(region.recvs) for region in plan.regions] == [[recv]] * 2
    assert plan.leaves == {leaf: leaf.variable}


def test_with_hooks_they_belong_to_a_region():
    leaf, recv = Leaf(is_hooked=True), Recv(is_hooked=True)
    plan = make_plan([Node(leaf, recv)], [Node(leaf, recv)])
    one, two = plan.regions
    assert plan.owners[leaf] is plan.owners[recv] is one
    assert two.touches == {one}
    assert one.has_hooked_recvs
    assert not two.has_hooked_recvs
    assert list(one.recvs) == [recv]
    assert not two.recvs
    assert set(one.targets) == {(leaf, 0)}
    assert plan.leaves == {}


def test_a_leaf_that_was_frozen_is_no_target():
    leaf = Leaf()
    leaf.variable.requires_grad = False
    plan = make_plan([Node(leaf)])
    assert not plan.regions[0].targets
    assert not plan.leaves


def test_the_roots_come_last_and_say_how_far_it_goes():
    late, early, unused = Recv(8), Recv(3), Recv(9)
    shared = Node(late)
    plan = make_plan([shared], [Node(unused)], roots=[Node(shared, early)])
    assert [region.send is None for region in plan.regions] == [False, False, True]
    assert plan.regions[2].touches == {plan.regions[0]}
    assert plan.regions[2].waits == 0
    assert plan.cutoff == 8


def test_sends_after_the_cutoff_are_not_looked_at():
    first, second = Node(Leaf()), Node(Leaf())
    plan = make_plan([first], [second], cutoff=1)
    assert list(plan.owners) == [first]
    assert len(plan.regions) == 1


def test_sends_may_lead_nowhere_or_to_targets_alone():
    leaf, recv = Leaf(), Recv()
    plan = make_plan([Node(None)], [leaf], [recv], [Node()])
    assert [set(region.targets) for region in plan.regions] == [set(), {(leaf, 0)}, {(recv, 0)}, set()]


@pytest.mark.parametrize("limit", [1, 4, 1 << 30])
def test_regions_are_what_reachability_says(limit):
    dice = random.Random(limit)
    for _ in range(200):
        nodes: list[Node] = [Leaf(is_hooked=dice.random() < 0.3), Recv(is_hooked=dice.random() < 0.3), Leaf()]
        for _ in range(dice.randint(1, 30)):
            nodes.append(Node(*(dice.choice([*nodes[-8:], None]) for _ in range(dice.randint(0, 3)))))
        sends = [[dice.choice(nodes) for _ in range(dice.randint(1, 2))] for _ in range(dice.randint(1, 5))]
        plan = make_plan(*sends, limit=limit)
        expected: dict[Node, int] = {}
        for number, starts in enumerate(sends):
            todo = list(starts)
            while todo:
                node = todo.pop()
                is_target = (isinstance(node, Leaf) and not node.variable._backward_hooks) or (
                    isinstance(node, Recv) and not node.record.is_hooked
                )
                if is_target or node in expected:
                    continue
                expected[node] = number
                if not isinstance(node, Recv):
                    todo += [child for child, _ in node.next_functions if child is not None]
        assert {node: region.message_id for node, region in plan.owners.items()} == expected
        for region in plan.regions:
            assert all(other.message_id < region.message_id for other in region.touches)


def test_a_long_chain_is_walked_once():
    class Counted(Node):
        reads = 0

        @property
        def next_functions(self):
            Counted.reads += 1
            return self.edges

        @next_functions.setter
        def next_functions(self, edges):
            self.edges = edges

    node: Node = Leaf()
    for _ in range(10_000):
        node = Counted(node, node)
    make_plan([node], [node], roots=[node], limit=100)
    assert Counted.reads == 10_000
