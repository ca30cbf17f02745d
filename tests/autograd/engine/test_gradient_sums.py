"""Sums of gradients, and those of leaves as people get them: in memory of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from arpc.autograd.engine.gradient_sums import GradientSums


def edge_to(leaf: Tensor) -> tuple[Any, int]:
    """The edge to the node of a leaf."""
    node = (leaf * 1).grad_fn
    assert node is not None
    return node.next_functions[0]


def test_sums_change_no_gradient_that_was_added():
    leaf = torch.zeros(3, requires_grad=True)
    edge = edge_to(leaf)
    parts = [torch.full((3,), float(number)) for number in range(1, 5)]
    gradients = GradientSums()
    for part in parts:
        gradients.add(edge, part)
    gradients.add(edge, torch.sparse_coo_tensor([[0]], [10.0], (3,), check_invariants=True))
    gradients.add(edge, parts[0])
    assert gradients.take_leaves()[leaf].tolist() == [21.0, 11.0, 11.0]
    assert [part.tolist() for part in parts] == [[float(number)] * 3 for number in range(1, 5)]


def test_gradients_that_somebody_else_has_are_copied():
    x, y = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    kept = torch.ones(2, 2)
    gradients = GradientSums()
    gradients.add(edge_to(x), kept)
    gradients.add(edge_to(y), torch.ones(2, 2).t())
    taken = gradients.take_leaves()
    taken[x].zero_()
    assert kept.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert taken[y].stride() == y.stride()


def test_a_gradient_that_nobody_else_has_is_not_copied():
    x = torch.ones(1000, requires_grad=True)
    gradients = GradientSums()
    gradients.add(edge_to(x), torch.full((1000,), 3.0))
    address = gradients[edge_to(x)].data_ptr()
    assert gradients.take_leaves()[x].data_ptr() == address


def test_one_gradient_of_two_leaves_is_copied_for_both():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    gradients = GradientSums()
    gradients.add(edge_to(x), torch.ones(2))
    gradients.add(edge_to(y), gradients[edge_to(x)])
    address = gradients[edge_to(x)].data_ptr()
    held = gradients[edge_to(x)].untyped_storage()  # or its memory could be used again
    taken = gradients.take_leaves()
    assert address not in {taken[x].data_ptr(), taken[y].data_ptr()}
    assert held.data_ptr() == address
    assert not gradients


def test_a_leaf_that_was_frozen_since_gets_none():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    gradients = GradientSums()
    gradients.add(edge_to(x), torch.ones(2))
    gradients.add(edge_to(y), torch.ones(2))
    x.requires_grad_(False)
    assert list(gradients.take_leaves()) == [y]


def test_gradients_of_a_recv_node_are_taken_together():
    node = object()
    gradients = GradientSums()
    assert gradients.take_recv(node, 2) is None
    gradients.add((node, 1), torch.ones(2))
    gradients.add((node, 1), torch.ones(2))
    none, two = gradients.take_recv(node, 2) or ()
    assert none is None
    assert two is not None
    assert two.tolist() == [2.0, 2.0]
    assert gradients.take_recv(node, 2) is None
