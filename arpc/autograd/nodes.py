"""The two nodes at which a graph is cut: where tensors left this worker, and where they came in. And one to go on from.

Torch's own names are kept, since people know them from graphs and profiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from arpc.errors import AutogradError

__all__ = [
    "ANCHOR",
    "SEND_NAME",
    "LeafNode",
    "PauseSignal",
    "RecvNode",
    "RecvRecord",
    "accumulate_at",
    "attach_plain",
    "attach_received",
    "attach_recv",
    "attach_send",
    "current_run",
    "edge_into",
    "pause_at",
    "run_backward",
]

run_backward: Final = torch.autograd.Variable._execution_engine.run_backward  # noqa: SLF001 - autograd.grad's own
SEND_NAME: Final = "torch::distributed::autograd::SendRpcBackward"

edge_into: Final[Callable[[tuple[Any, int, None]], GradientEdge]] = partial(tuple.__new__, GradientEdge)
"""Of a node, which of its inputs, and None. What `GradientEdge` itself makes of the first two takes twice as long."""

ANCHOR: Final = torch.empty(0, requires_grad=True)
"""A leaf below every recv node: an engine that is asked for its gradient runs them all. It never gets one."""


class PauseSignal(BaseException):
    """Raised at a send node that the engine has reached: what was ready has run. Not an error, and never seen outside.

    A BaseException, so that no hook of a user takes it for one.
    """

    def __init__(self, run: int) -> None:
        super().__init__(run)
        self.run = run
        """Which call of the engine it has ended, see `current_run`."""


def current_run() -> int:
    """Within a node or a hook: which call of torch's engine runs it. Others may be under way in other threads."""
    run: int = torch._C._current_graph_task_id()  # noqa: SLF001 - what torch's own hooks over several tensors go by
    return run


class RecvRecord:
    """What a recv node knows: which message its tensors came with, and who gets their gradients."""

    deliver: Callable[[RecvRecord, tuple[Tensor | None, ...]], None] | None = None
    """Takes the gradients if the node is run; set while a pass does that."""
    is_spent = False
    """A pass that did not retain the graph went through here."""
    is_hooked = False
    """The node was given hooks: it is to be run."""

    def __init__(self, message_id: int, sender: int, count: int) -> None:
        self.message_id = message_id
        self.sender = sender
        """The id of the worker that sent the message."""
        self.count = count
        """How many tensors came with it that require grad."""


_TOKEN: Final = torch.zeros(())


def _send_forward(_: Any, *__: Tensor) -> Tensor:
    return _TOKEN.data  # the cheapest tensor there is


def _send_backward(_: Any, *__: Any) -> Any:
    raise AutogradError("a send node was run: this is a bug of arpc")


def _recv_forward(ctx: Any, _: Tensor, received: tuple[Any, ...]) -> tuple[Tensor, ...]:
    ctx.record = received[0]
    # like local autograd: no gradient is None, not zeros
    ctx.materialize_grads = False  # what `set_materialize_grads` does
    # They come in a tuple: as direct inputs they would be copied. And in one with the record: torch looks long at what
    # is no tensor
    return received[1:]


def _recv_backward(ctx: Any, *gradients: Tensor | None) -> Any:
    record: RecvRecord = ctx.record
    if record.deliver is None:
        raise AutogradError(
            "a graph that leads to other workers was run by torch's own backward(): "
            "use `await arpc.autograd.backward(ctx_id, [loss])`"
        )
    record.deliver(record, gradients)
    return None, None


_SendRpc: Any = type(
    "torch::distributed::autograd::SendRpc",
    (Function,),
    {"forward": staticmethod(_send_forward), "backward": staticmethod(_send_backward)},
)
_RecvRpc: Any = type(
    "torch::distributed::autograd::RecvRpc",
    (Function,),
    {"forward": staticmethod(_recv_forward), "backward": staticmethod(_recv_backward)},
)


def _source_forward(ctx: Any, gradients: list[Tensor], *_: Tensor) -> Tensor:
    ctx.gradients = gradients
    return _TOKEN.data


def _source_backward(ctx: Any, *_: Any) -> Any:
    # given away: torch takes over a gradient that nobody else has, and copies any other
    gradients = tuple(ctx.gradients)
    ctx.gradients.clear()
    return None, *gradients


_SourceRpc: Any = type(
    "arpc::autograd::Source",
    (Function,),
    {"forward": staticmethod(_source_forward), "backward": staticmethod(_source_backward)},
)
RecvNode: Final[type] = _RecvRpc._backward_cls  # noqa: SLF001 - the class of the node in the graph
"""The class of recv nodes; their ``record`` is a `RecvRecord`."""
# What the engine calls. It would find out first that this is the function which was given, and no other.
RecvNode.apply = _recv_backward  # type: ignore[attr-defined]


def _noting(register: Callable[[Any, Any], RemovableHandle]) -> Callable[[Any, Any], RemovableHandle]:
    """A method of recv nodes that registers hooks. Torch does not tell afterwards whether there are some."""

    def noting(node: Any, hook: Any) -> RemovableHandle:
        node.record.is_hooked = True
        return register(node, hook)

    return noting


for _name in ("register_hook", "register_prehook"):
    setattr(RecvNode, _name, _noting(getattr(RecvNode, _name)))

# What `Function.apply` comes down to when no transform of functorch is active; that alone takes a microsecond to tell,
# and under one nothing can be sent anyway
_apply_send: Final[Any] = super(Function, _SendRpc).apply
_apply_recv: Final[Any] = super(Function, _RecvRpc).apply


_PLAIN: Final = frozenset((Tensor, Parameter))
# Torch's own way to make a node that must not be run, and by far the cheapest way to make one at all
_make_delayed_error: Final[Any] = torch._C._functions.DelayedError  # noqa: SLF001 - that of `once_differentiable`
_FEW: Final = 16
_delayed_errors: Final = tuple(_make_delayed_error("a send node was run", 1 + count) for count in range(_FEW))


attach_plain: Final = tuple(partial(make, _TOKEN) for make in _delayed_errors)
"""By how many they are: what `attach_send` calls with tensors that are nothing more than that.

The first of the tensors that it returns has the node as its history.
"""


def attach_send(tensors: Sequence[Tensor]) -> Any:
    """A node whose edges, but for the first, lead to where the tensors came from. It keeps no memory of theirs.

    Its first input is a scalar. What is done to the tensors in place afterwards does not change where their gradients
    go. Grad mode must be on.
    """
    count = len(tensors)
    if not _PLAIN.issuperset(map(type, tensors)):
        return _node_of(_apply_send(_TOKEN, *tensors))  # which does not look at them: they may do something then
    if count < _FEW:
        return attach_plain[count](*tensors)[0].grad_fn
    return _make_delayed_error("a send node was run", 1 + count)(_TOKEN, *tensors)[0].grad_fn


def _node_of(output: Tensor) -> Any:
    """The node that made a tensor. Up to torch 2.10 at least, it loses its edges when its output is gone: keep that."""
    node: Any = output.grad_fn
    if _NEEDS_OUTPUT:
        node.output = output
    return node


def _needs_output() -> bool:
    with torch.enable_grad():
        node = _apply_send(_TOKEN, ANCHOR).grad_fn
    try:
        return not node.next_functions
    except RuntimeError:
        return True


_NEEDS_OUTPUT: Final = _needs_output()

LeafNode: Final[type] = type(attach_send([ANCHOR]).next_functions[1][0])
"""The class of the nodes where leaves are; their ``variable`` is the tensor."""


def pause_at(send: Any) -> RemovableHandle:
    """Let a send node raise a `PauseSignal` when the engine reaches it, until what is returned is removed."""
    handle: RemovableHandle = send.register_prehook(_pause)
    return handle


def _pause(_: Any) -> None:
    raise PauseSignal(current_run())


attach_received: Final[Callable[[tuple[Any, ...]], tuple[Tensor, ...]]] = partial(_apply_recv, ANCHOR)
"""`attach_recv` for a tuple of the record and the tensors."""


def attach_recv(tensors: Sequence[Tensor], record: RecvRecord) -> tuple[Tensor, ...]:
    """Tensors with the same data, and one recv node as their history. Grad mode must be on.

    Those that are given must have no history yet. The new ones are no views and no leaves, so they may be changed in
    place, and each counts its own versions if it did before.
    """
    return attach_received((record, *tensors))


def accumulate_at(leaves: Sequence[Tensor], gradients: list[Tensor]) -> None:
    """Let torch accumulate gradients into ``.grad`` of leaves, with all the hooks there are. Empties the list."""
    with torch.enable_grad():
        token: Tensor = _SourceRpc.apply(gradients, *leaves)
    run_backward((token,), (_TOKEN,), False, False, (), allow_unreachable=True, accumulate_grad=True)
