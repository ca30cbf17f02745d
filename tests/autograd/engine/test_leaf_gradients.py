"""Sums of gradients of leaves, as people get them: in memory of their own."""

from __future__ import annotations

import torch

from arpc.autograd.engine.leaf_gradients import LeafGradients


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


def test_gradients_that_somebody_else_has_are_copied():
    x, y = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    kept = torch.ones(2, 2)
    gradients = LeafGradients()
    gradients.add(x, kept)
    gradients.add(y, torch.ones(2, 2).t())
    taken = gradients.take()
    taken[x].zero_()
    assert kept.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert taken[y].stride() == y.stride()


def test_a_gradient_that_nobody_else_has_is_not_copied():
    x = torch.ones(1000, requires_grad=True)
    gradients = LeafGradients()
    gradients.add(x, torch.full((1000,), 3.0))
    address = gradients._gradients[id(x)][1].data_ptr()
    assert gradients.take()[x].data_ptr() == address
