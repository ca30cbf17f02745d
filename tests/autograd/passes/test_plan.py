"""Regions of graphs made of nodes that are no torch at all."""

from __future__ import annotations

import random

import pytest

from arpc.autograd import graph
from arpc.autograd.engine import Source
from arpc.autograd.graph import Planner


class Variable:
    requires_grad = True

    def __init__(self, hooks=None) -> None:
        self._backward_hooks = hooks


class Node:
    def __init__(self, *children, name="") -> None:
        self.next_functions = tuple((child, 0) for child in children)
        self.name = name


class Leaf(Node):
    def __init__(self, hooks=None) -> None:
        super().__init__()
        self.variable = Variable(hooks)


class Recv(Node):
    """Leads to something in torch too, which is not to be followed."""

    def __init__(self) -> None:
        super().__init__(Leaf())


def plan(*sources, limit=1 << 30, keeps_all=False):
    planner = Planner([Source([(node, 0) for node in source], None) for source in sources], Recv, keeps_all=keeps_all)
    while not planner.walk(limit):
        pass
    return planner.plan()


def test_one_source_makes_one_region():
    leaf, recv = Leaf(), Recv()
    root = Node(Node(leaf), Node(recv, None))
    found = plan([root])
    assert found.regions.keys() == {1}
    assert list(found.regions[1].leaves) == [leaf]
    assert found.regions[1].recvs == [recv]
    assert found.sources_of is None
    assert found.count == 5


def test_a_leaf_is_shared_without_making_a_border():
    leaf = Leaf()
    found = plan([Node(leaf)], [Node(leaf)])
    assert found.sources_of is None
    assert all(list(region.leaves) == [leaf] for region in found.regions.values())


def test_a_leaf_with_hooks_waits_for_all_that_reach_it():
    leaf = Leaf(hooks={1: print})
    first, second = Node(leaf), Node(leaf)
    found = plan([first], [second])
    assert found.sources(leaf) == 0b11
    assert found.hooked_leaves.keys() == {leaf}
    assert [exit_.to[0] for exit_ in found.regions[0b01].exits] == [leaf]
    assert found.regions[0b10].leaves == {}


def test_what_two_sources_reach_is_a_region_of_its_own():
    leaf, recv = Leaf(), Recv()
    shared = Node(leaf, recv)
    first, second = Node(shared), Node(shared, leaf)
    found = plan([first], [second])
    assert {node: found.sources(node) for node in (first, second, shared, recv)} == {
        first: 0b01,
        second: 0b10,
        shared: 0b11,
        recv: 0b11,
    }
    assert found.regions[0b11].recvs == [recv]
    assert [(exit_.node, exit_.place) for exit_ in found.regions[0b10].exits] == [(second, 0)]
    assert list(found.regions[0b10].leaves) == [leaf]


def test_a_source_may_be_a_leaf_or_a_recv_itself():
    leaf, recv = Leaf(), Recv()
    found = plan([leaf, recv])
    assert list(found.regions[1].leaves) == [leaf]
    assert found.regions[1].recvs == [recv]


def test_sources_that_lead_nowhere_have_empty_regions():
    found = plan([], [Node()])
    assert found.regions.keys() == {1, 2}
    assert found.regions[1].recvs == []


def random_graph(seed):
    dice = random.Random(seed)
    nodes = [Leaf() if dice.random() < 0.6 else Recv() for _ in range(4)] + [Leaf(hooks={1: 1})]
    for number in range(30):
        children = [dice.choice([*nodes, None]) for _ in range(dice.randint(1, 3))]
        nodes.append(Node(*children, name=str(number)))
    sources = [[dice.choice(nodes) for _ in range(dice.randint(1, 2))] for _ in range(dice.randint(1, 5))]
    return nodes, sources


def reachable(nodes):
    seen, stack = set(), list(nodes)
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if not isinstance(node, Recv):
            stack += [child for child, _ in node.next_functions]
    return seen


def test_regions_are_what_reachability_says():
    for seed in range(300):
        _, sources = random_graph(seed)
        reached = [reachable(source) for source in sources]
        found = plan(*sources, limit=seed % 7 + 1)
        plain = {leaf for leaf in set().union(*reached) if isinstance(leaf, Leaf) and not leaf.variable._backward_hooks}
        assert found.leaves.keys() == plain
        for node in set().union(*reached) - plain:
            mask = sum(1 << number for number, nodes in enumerate(reached) if node in nodes)
            assert found.sources(node) == mask, seed
            if isinstance(node, Recv):
                assert node in found.regions[mask].recvs
        assert found.nodes.keys() == set().union(*reached) - plain
        for region in found.regions.values():
            assert len(region.recvs) == len(set(region.recvs))
            for exit_ in region.exits:
                assert found.sources(exit_.node) == region.sources
                assert found.sources(exit_.to[0]) != region.sources
                assert exit_.node.next_functions[exit_.place] == exit_.to


# -- large graphs that one source reaches


def made_at_random(seed, size):
    choose = random.Random(seed)
    ends = [Leaf(), Leaf(hooks={1: print}), Leaf(), Recv(), Recv(), None]
    nodes = list(ends)
    for _ in range(size):
        reach = nodes if choose.random() < 0.1 else nodes[-3:]
        nodes.append(Node(*[choose.choice(reach) for _ in range(choose.choice([1, 1, 1, 2, 2, 3]))]))
    return nodes[-1]


@pytest.mark.parametrize("leaf_class", [Leaf, None], ids=["leaves are known", "leaves are found"])
@pytest.mark.parametrize("strides", [None, (range(2), range(3))], ids=["few are kept", "many are kept"])
def test_of_a_large_graph_only_what_matters_is_kept(leaf_class, strides, monkeypatch):
    monkeypatch.setattr(graph, "_leaf_class", leaf_class)
    if strides is not None:
        monkeypatch.setattr(graph, "_STRIDES", strides)
    for seed in range(30):
        root = made_at_random(seed, 100 * (1 + seed % 10))
        every, found = plan([root], keeps_all=True), plan([root], limit=1 + 37 * seed)
        assert set(found.leaves) == set(every.leaves)
        assert found.hooked_leaves == every.hooked_leaves
        assert set(found.regions[1].leaves) == set(every.regions[1].leaves)
        assert sorted(map(id, found.recvs)) == sorted(map(id, every.recvs))
        assert all(found.sources(node) == 1 for node in [*found.recvs, *found.hooked_leaves])
        assert found.count >= every.count
        if every.count < 100:
            assert found.nodes == every.nodes


def test_a_chain_keeps_next_to_nothing():
    leaf = Leaf()
    node = leaf
    for _ in range(5000):
        node = Node(node, None)
    found = plan([node])
    assert list(found.leaves) == [leaf]
    assert not found.nodes
    assert 5000 <= found.count <= 5100


@pytest.mark.parametrize("leaf_class", [Leaf, None], ids=["leaves are known", "leaves are found"])
@pytest.mark.parametrize("limit", [1, 7, 1 << 30])
def test_a_chain_has_leaves_at_its_sides(leaf_class, limit, monkeypatch):
    monkeypatch.setattr(graph, "_leaf_class", leaf_class)
    node, recv = Recv(), Recv()
    end, plain, hooked = node, Leaf(), Leaf(hooks={1: print})
    for number in range(1000):
        sides = [(node,), (node, None), (None, node), (node, plain), (hooked, node), (None, node, None)]
        node = Node(*sides[number % len(sides)])
        if number == 500:
            node = Node(node, recv)
    found = plan([node], limit=limit)
    assert list(found.leaves) == list(found.regions[1].leaves) == [plain]
    assert list(found.hooked_leaves) == [hooked]
    assert set(found.recvs) == {end, recv}
    assert found.count >= 1000


def test_a_chain_may_lead_nowhere():
    node = Node(None, None)
    for _ in range(1000):
        node = Node(node)
    found = plan([node])
    assert not found.leaves
    assert found.count >= 1000


class Counted(Node):
    """Counts how often any of them is visited."""

    visits = 0

    @property
    def next_functions(self):
        Counted.visits += 1
        return self._next

    @next_functions.setter
    def next_functions(self, edges):
        self._next = edges


def test_a_chain_is_walked_once_and_what_was_walked_is_not_walked_again(monkeypatch):
    chain = Leaf()
    for _ in range(1000):
        chain = Counted(chain)
    monkeypatch.setattr(Counted, "visits", 0)
    planner = Planner([Source([(chain, 0)], None)], Recv)
    while not planner.walk(300):
        pass
    assert planner.walk(300)
    assert 1000 <= Counted.visits <= 1010


def test_ways_that_meet_again_and_again_are_not_walked_again_and_again(monkeypatch):
    leaf = Leaf()
    ladder = leaf
    for _ in range(500):  # 2 ** 500 ways
        middle = Counted(ladder)
        ladder = Counted(Counted(middle), Counted(middle))
    chain = ladder
    for _ in range(1000):
        chain = Counted(chain)
    root = Counted(*[Counted(chain) for _ in range(500)])
    monkeypatch.setattr(Counted, "visits", 0)
    assert list(plan([root]).leaves) == [leaf]
    assert Counted.visits < 20 * 3500


@pytest.mark.parametrize("order", [1, -1])
def test_many_ways_into_one_chain_are_not_followed_to_its_end(order, monkeypatch):
    leaf = Leaf()
    states = [leaf]
    for _ in range(4000):
        states.append(Counted(states[-1]))
    root = Counted(*[Counted(state) for state in states[4::4][::order]])
    monkeypatch.setattr(Counted, "visits", 0)
    assert list(plan([root]).leaves) == [leaf]
    assert Counted.visits < 20 * 5000
