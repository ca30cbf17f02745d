"""The two nodes at which a graph is cut: a send node where tensors left this worker, a recv node where they came in.

They have the names that torch gives to its own, which users know from graphs and profiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final
from weakref import ref

import msgspec
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter

from arpc.errors import AutogradError
from arpc.private import torch as private

__all__ = [
    "ANCHOR",
    "SCALAR",
    "SEND_NAME",
    "LeafNode",
    "RecvCollector",
    "RecvNode",
    "RecvRecord",
    "attach_recv",
    "attach_send",
    "edge_into",
    "run_backward",
]

run_backward: Final = private.run_backward
SEND_NAME: Final = "torch::distributed::autograd::SendRpcBackward"

edge_into: Final[Callable[[tuple[Any, int, None]], GradientEdge]] = partial(tuple.__new__, GradientEdge)
"""A `GradientEdge` of a node, the number of one of its inputs, and None. Its own constructor takes twice as long."""

ANCHOR: Final = torch.empty(0, requires_grad=True)
"""A leaf below every recv node: the engine executes recv nodes if asked for its gradient, which never arrives."""
SCALAR: Final = torch.zeros(())
"""The first input of every send node, and a gradient for it."""


class RecvRecord(msgspec.Struct, eq=False):
    """The data of a recv node: the message that its tensors came with, and the worker that gets their gradients."""

    message_id: int
    sender: int
    """The id of the worker that sent the message."""
    count: int
    """The number of tensors in the message that require grad."""
    stamp: int = 0
    """The clock of the sender when it sent the message."""
    deliver: Callable[[Any, Sequence[Tensor | None]], None] | None = None
    """Takes the node and its gradients when the engine executes the node; set only while a pass does that."""
    spent_by: int | None = None
    """The pass that went through the node and freed the graph."""
    is_hooked: bool = False
    """Whether a hook was registered at the node or one of its tensors: the node must execute, with whole gradients."""
    tensors: Sequence[ref[Tensor]] = ()
    """Weak references to the tensors that came with the message."""

    @property
    def retains_grad(self) -> bool:
        """Whether `torch.Tensor.retain_grad` was called for one of its tensors: only torch's engine can apply it."""
        for reference in self.tensors:
            tensor = reference()
            if tensor is not None and tensor.retains_grad:
                return True
        return False


# -- where tensors leave


def _send_forward(_: Any, *__: Tensor) -> Tensor:
    return SCALAR.data


def _send_backward(_: Any, *__: Any) -> Any:
    raise AutogradError("a send node was run: this is a bug of arpc")


_SendRpc: Any = type(
    "torch::distributed::autograd::SendRpc",
    (Function,),
    {"forward": staticmethod(_send_forward), "backward": staticmethod(_send_backward)},
)
_PLAIN: Final = frozenset((Tensor, Parameter))
# The node that torch uses for `once_differentiable`: it must not be run either, and is the cheapest node there is
_delayed_error: Final[Any] = private.DelayedError
_FEW: Final = 16
_delayed_errors: Final = tuple(_delayed_error("a send node was run", 1 + count) for count in range(_FEW))


def attach_send(tensors: Sequence[Tensor]) -> Any:
    """Make a node whose edges, except the first, lead to the nodes that the tensors came from.

    Its first input is `SCALAR`. It does not keep the memory of the tensors alive, and later in-place changes of them do
    not change where their gradients go. Grad mode must be on.
    """
    count = len(tensors)
    if not _PLAIN.issuperset(map(type, tensors)):
        return _node_of(_apply_send(SCALAR, *tensors))  # subclasses may override what DelayedError does with a tensor
    make = _delayed_errors[count] if count < _FEW else _delayed_error("a send node was run", 1 + count)
    return make(SCALAR, *tensors)[0].grad_fn


# -- where tensors come in


def _recv_forward(ctx: Any, _: Tensor, received: tuple[Any, ...]) -> tuple[Tensor, ...]:
    ctx.record = received[0]
    ctx.materialize_grads = False  # as in local autograd: a missing gradient is None, not zeros
    # The tensors come in a tuple, or torch would copy them; the record is in it, since other arguments take longer
    return received[1:]


def _recv_backward(ctx: Any, *gradients: Tensor | None) -> Any:
    record: RecvRecord = ctx.record
    if record.deliver is None:
        raise AutogradError(
            "a graph that leads to other workers was run by torch's own backward(): "
            "use `await arpc.autograd.backward(ctx_id, [loss])`"
        )
    record.deliver(ctx, gradients)
    return None, None


_RecvRpc: Any = type(
    "torch::distributed::autograd::RecvRpc",
    (Function,),
    {"forward": staticmethod(_recv_forward), "backward": staticmethod(_recv_backward)},
)
RecvNode: Final[type] = _RecvRpc._backward_cls  # noqa: SLF001 - the class of the node in the graph
"""The class of recv nodes; their ``record`` is a `RecvRecord`."""


def _noting(register: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wrap a method of recv nodes that registers hooks, to record that: torch cannot list them afterwards."""

    def noting(node: Any, hook: Any) -> Any:
        node.record.is_hooked = True
        return register(node, hook)

    return noting


# `_register_hook_dict` is what `Tensor.register_hook` calls
for _name in ("register_hook", "register_prehook", "_register_hook_dict"):
    setattr(RecvNode, _name, _noting(getattr(RecvNode, _name)))

# What `Function.apply` calls if no transform of functorch is active. Nothing can be sent from within one
_apply_send: Final[Any] = super(Function, _SendRpc).apply
_apply_recv: Final[Any] = super(Function, _RecvRpc).apply


def attach_recv(tensors: Sequence[Tensor], record: RecvRecord) -> tuple[Tensor, ...]:
    """Give tensors one recv node as their history. They must have none yet, and grad mode must be on.

    They are neither views nor leaves, so they may be changed in place. Each counts its own versions if it did before.
    """
    attached: tuple[Tensor, ...] = _apply_recv(ANCHOR, (record, *tensors))
    record.tensors = tuple(map(ref, attached))
    return attached


class RecvCollector:
    """Takes the gradients of recv nodes that torch's engine executes."""

    def __init__(self, records: Sequence[RecvRecord]) -> None:
        self.captured: list[tuple[tuple[Any, int], Tensor]] = []
        """The gradients, each with its node and the number of its tensor."""
        self._records = records
        for record in records:
            record.deliver = self._deliver

    def _deliver(self, node: Any, gradients: Sequence[Tensor | None]) -> None:
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                self.captured.append(((node, place), gradient))

    def close(self) -> None:
        """Take no more gradients: torch's own backward() raises again if it reaches one of the nodes."""
        for record in self._records:
            record.deliver = None


def _node_of(output: Tensor) -> Any:
    """Return the node that made a tensor. Up to torch 2.10 at least, it loses its edges with its output: keep that."""
    node: Any = output.grad_fn
    if _NEEDS_OUTPUT:
        node.output = output
    return node


def _needs_output() -> bool:
    with torch.enable_grad():
        node = _apply_send(SCALAR, ANCHOR).grad_fn
    try:
        return not node.next_functions
    except RuntimeError:
        return True


_NEEDS_OUTPUT: Final = _needs_output()

LeafNode: Final[type] = type(attach_send([ANCHOR]).next_functions[1][0])
"""The class of the nodes of leaves; their ``variable`` is the tensor."""
