"""Hooks that torch runs when it writes ``.grad``: those of DDP, of ``AccumulateGrad`` nodes, and after an accumulation.

A pass keeps gradients with its context, so nothing is written to ``.grad`` and such hooks would never run. For leaves
that have some, torch accumulates once the pass has their gradients on this worker: ``.grad`` is set to None, torch
writes to it and runs the hooks, and its value then is the gradient of the context. After that each leaf gets its former
``.grad`` back. Other code that uses ``.grad`` would see that during a pass, so it is done for no other leaf.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from arpc.autograd.nodes import SCALAR, run_backward
from arpc.errors import AutogradError
from arpc.private.torch import backward_hooks, post_accumulate_hooks

__all__ = ["accumulate_with_hooks", "has_accumulate_hooks", "has_node_hooks", "heed_accumulate_hooks"]


class _Group:
    """Leaves whose hooks belong together: hooks of one may write to ``.grad`` of another, as DDP's do."""

    def __init__(self, members: Iterable[Tensor]) -> None:
        self.lock = threading.Lock()
        self._members = [TensorWeakRef(member) for member in members]

    @property
    def members(self) -> list[Tensor]:
        return [member for reference in self._members if (member := reference()) is not None]


_ALONE: Final = _Group(())
"""The group of all leaves that are in no other: one of them is accumulated at a time."""
_groups: Final = WeakTensorKeyDictionary()


def _group_of(leaf: Tensor) -> _Group:
    group: _Group = _groups.get(leaf, _ALONE)  # type: ignore[no-untyped-call]
    return group


def heed_accumulate_hooks(parameters: Iterable[Tensor]) -> None:
    """Declare that leaves have hooks that torch runs when it writes ``.grad``, so that backward passes run them too.

    Use it for DistributedDataParallel, whose hooks cannot be seen from outside. The gradients of a context are then the
    averages::

        model = DistributedDataParallel(model)
        arpc.autograd.heed_accumulate_hooks(model.parameters())

    Not needed for `torch.Tensor.register_post_accumulate_grad_hook`, and hooks of a leaf itself run in any case.
    Other code must not use ``.grad`` of these leaves during a pass: at the end of the pass it holds, for a moment, the
    gradients that the hooks see. The hooks run in a thread, one pass at a time, and may wait for other workers. Raises
    `AutogradError` if one of the parameters is not a leaf.
    """
    leaves = list(parameters)
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or not leaf.is_leaf:
            raise AutogradError("only leaves, such as parameters, have hooks that run when their .grad is written")
    group = _Group(leaves)
    for leaf in leaves:
        _groups[leaf] = group


def has_accumulate_hooks(_: Any, leaf: Any) -> bool:
    """Whether a leaf has hooks that must run when its gradient is accumulated."""
    # `data` tells whether there are entries, without checking which of them are still alive
    return bool(post_accumulate_hooks(leaf) or (_groups.data and leaf in _groups))


def has_node_hooks(node: Any, leaf: Any) -> bool:
    """Whether there are hooks at the accumulation, or hooks in Python at the node itself, which are slow to detect."""
    if has_accumulate_hooks(node, leaf):
        return True
    with _looking:  # the probe of another thread would be taken for a hook
        handle = node.register_hook(_look_only)
        try:
            return len(handle.hooks_dict_ref()) > 1
        finally:
            handle.remove()


_looking: Final = threading.Lock()


def _look_only(*_: Any) -> None:
    """The probe for other hooks: it is never called, but its registration shows them."""


def accumulate_with_hooks(leaves: Sequence[Tensor], gradients: list[Tensor]) -> dict[Tensor, Tensor]:
    """Let torch accumulate the gradients that a pass has computed; return the resulting ones, by leaf. Hooks may block.

    The list is emptied. The result has further leaves if hooks have written to their ``.grad``.
    """
    groups = {id(group): group for leaf in leaves for group in [_group_of(leaf)]}
    others = {id(member): member for group in groups.values() for member in group.members}
    for leaf in leaves:
        others.pop(id(leaf), None)
    with ExitStack() as stack:
        for _, group in sorted(groups.items()):  # in one order, so that there is no deadlock
            stack.enter_context(group.lock)
        return _accumulate_apart(leaves, list(others.values()), gradients)


def _accumulate_apart(
    leaves: Sequence[Tensor], others: Sequence[Tensor], gradients: list[Tensor]
) -> dict[Tensor, Tensor]:
    """Accumulate with every ``.grad`` None at first, and return the results; the former ones are restored."""
    all_leaves = [*leaves, *others]
    before = [leaf.grad for leaf in all_leaves]
    # the leaves' own hooks have seen these gradients already
    silenced = [(hooks, dict(hooks)) for leaf in leaves if (hooks := backward_hooks(leaf))]
    try:
        for leaf in all_leaves:
            leaf.grad = None
        for hooks, _ in silenced:
            hooks.clear()
        _accumulate(leaves, gradients)
        return {leaf: leaf.grad for leaf in all_leaves if leaf.grad is not None}
    finally:
        for hooks, own in silenced:
            hooks.update(own)
        with torch.no_grad():
            for leaf, gradient in zip(all_leaves, before, strict=True):
                leaf.grad = gradient


def _source_forward(ctx: Any, gradients: list[Tensor], *_: Tensor) -> Tensor:
    ctx.gradients = gradients
    return SCALAR.data


def _source_backward(ctx: Any, *_: Any) -> Any:
    # no reference is kept: torch takes over a gradient that nothing else refers to, and copies any other
    gradients = tuple(ctx.gradients)
    ctx.gradients.clear()
    return None, *gradients


_Source: Final[Any] = type(
    "arpc::autograd::Source",
    (Function,),
    {"forward": staticmethod(_source_forward), "backward": staticmethod(_source_backward)},
)


def _accumulate(leaves: Sequence[Tensor], gradients: list[Tensor]) -> None:
    """Let torch accumulate gradients into ``.grad`` of leaves, and run all hooks. Empties the list."""
    with torch.enable_grad():
        token: Tensor = _Source.apply(gradients, *leaves)
    run_backward((token,), (SCALAR,), False, False, (), allow_unreachable=True, accumulate_grad=True)
