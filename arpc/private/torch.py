"""Undocumented APIs of torch.

Those that make calls fast are probed at import and have a fallback that uses documented APIs only;
``ARPC_PUBLIC_APIS=1`` in the environment turns them off, and `private_apis` reports which are on. The others have no
public equivalent: they are at the end of the module, and most are looked up when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter, methodcaller
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from arpc.private.switch import PUBLIC_ONLY

__all__ = [
    "DelayedError",
    "backward_hooks",
    "build_event_tree",
    "compiled_unit",
    "create_store",
    "current_engine_run",
    "dynamic_setting",
    "fits_like",
    "fits_nothing",
    "is_mutable",
    "is_profiled",
    "is_zero_tensor",
    "make_subclass",
    "nested_places",
    "operator_named",
    "overload_name",
    "packet_name",
    "post_accumulate_hooks",
    "private_apis",
    "rebuild_nested",
    "run_backward",
    "sequence_number",
    "set_sequence_number",
    "without_torch_dispatch",
]


def private_apis() -> dict[str, bool]:
    """Return which undocumented APIs of torch are in use."""
    return {"TensorGuards": _uses_guards}


def fits_nothing(*_: Any) -> bool:
    """Recognize no tensors: the caller compares their attributes one by one."""
    return False


def fits_like(examples: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a function that checks, in one call, whether tensors look like the examples.

    It compares class, device, dtype, shape, strides, ``requires_grad`` and the lazy conjugate and negative bits, and
    checks that no tensor occurs twice, as torch's compiler does before it runs compiled code. False proves nothing:
    another mode of torch may be active, or `TensorGuards` may be off. The examples must be strided. They are not kept
    alive.

    The function must not be called with nested tensors: torch would abort the process.
    """
    return _guard(examples) if _uses_guards else fits_nothing


def _guard(examples: Sequence[Tensor]) -> Callable[..., bool]:
    sizes = [[*example.shape] for example in examples]
    strides = [[*example.stride()] for example in examples]
    guards: Any = torch._C._dynamo.guards.TensorGuards
    check: Callable[..., bool] = guards(*examples, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


def _guards_are_reliable() -> bool:
    """Whether `TensorGuards` of this version of torch recognizes all differences that matter here."""
    plain, other = torch.ones(2, 2), torch.ones(2, 2)
    try:
        fits, fits_both = _guard([plain]), _guard([plain, plain.double().requires_grad_()])
        requiring = torch.ones(2, 2, requires_grad=True)
        with torch.no_grad():
            others = [fits(requiring), fits_both(plain, plain.double())]
        others += [
            fits(unlike)
            for unlike in (
                torch.ones(4),
                torch.ones(2, 3),
                torch.ones(3, 2).t(),
                torch.ones(2, 4)[:, ::2],
                plain.double(),
                plain.to("meta"),
                requiring,
                Parameter(plain, requires_grad=False),
                torch._neg_view(plain),
                torch._efficientzerotensor(2, 2),
                None,
            )
        ]
        others.append(_guard([plain, other])(plain, plain))
        complex_ = plain.to(torch.complex64)
        others.append(_guard([complex_])(complex_.conj()))
        return fits(other) and fits_both(other, requiring.double().detach().requires_grad_()) and not any(others)
    except Exception:  # noqa: BLE001 - any error means that this version of torch is not as expected
        return False


_uses_guards: Final = not PUBLIC_ONLY and _guards_are_reliable()


# -- without a public equivalent


def make_subclass(cls: type[Tensor], data: Tensor, requires_grad: bool) -> Tensor:
    """Return a tensor of a subclass over the memory of another tensor, as `Parameter` makes its instances."""
    return Tensor._make_subclass(cls, data, requires_grad)


def without_torch_dispatch() -> AbstractContextManager[object]:
    """Return a context in which operators ignore ``__torch_dispatch__`` and take tensors as they are in memory."""
    made: AbstractContextManager[object] = torch._C._DisableTorchDispatch()
    return made


def is_zero_tensor(tensor: Tensor) -> bool:
    """Whether a tensor is one of autograd's zeros, which have no memory."""
    return tensor._is_zerotensor()


def rebuild_nested() -> Any:
    """Return the function that makes a saved nested tensor."""
    return torch._utils._rebuild_nested_tensor


def nested_places(tensor: Tensor) -> tuple[list[Any], list[Any], list[Any]]:
    """Return shapes, strides and storage offsets of the parts of a nested tensor."""
    sizes, strides = tensor._nested_tensor_size(), tensor._nested_tensor_strides()
    return sizes.tolist(), strides.tolist(), tensor._nested_tensor_storage_offsets().tolist()


def operator_named(name: str) -> Callable[..., Any] | None:
    """Return TorchScript's operator of a name such as ``aten::add``, with all its overloads; None if there is none."""
    call, _ = torch._C._jit_get_operation(name)
    found: Callable[..., Any] | None = call
    return found


def packet_name(packet: Any) -> str:
    """Return the name that a packet of operators has in ``torch.ops``."""
    name: str = packet._qualified_op_name
    return name


def overload_name(overload: Any) -> str:
    """Return the name of an operator in its packet."""
    name: str = overload._overloadname
    return name


def is_mutable(overload: Any) -> bool:
    """Whether an operator changes some of its arguments."""
    return bool(overload._schema.is_mutable)


def dynamic_setting(context: Any) -> bool | None:
    """Return the argument ``dynamic`` of the call of `torch.compile` that made a context."""
    setting: bool | None = context._dynamic
    return setting


def compiled_unit() -> Any:
    """Return the object in which TorchScript keeps all code that this process has compiled."""
    from torch.jit import _state  # some builds of torch have no torch.jit

    return _state._python_cu


is_profiled: Final[Callable[[], bool]] = torch._C._autograd._profiler_enabled
"""Returns whether a profiler of torch runs in this thread."""


def build_event_tree(events: Any) -> None:
    """Find the parent of each of the events of a profile, as the profilers of torch do."""
    events._build_tree()


def create_store(options: Any, rank: int) -> Any:
    """Open the store of an ``init_method`` for a group whose size is not known, as torch's own ``init_rpc`` does."""
    return torch.distributed._create_store_from_options(options, rank)  # type: ignore[no-untyped-call, attr-defined]


# -- autograd, also without a public equivalent: `arpc.autograd.engine.pausing` tests on a small graph whether it works

run_backward: Final[Callable[..., Any]] = torch.autograd.Variable._execution_engine.run_backward
"""The function of the engine that ``torch.autograd.grad`` and ``backward`` call."""

DelayedError: Final[Any] = torch._C._functions.DelayedError
"""Makes nodes of a graph that raise an error when they are run backwards."""

backward_hooks: Final = attrgetter("_backward_hooks")
"""The hooks of a tensor that see its gradient, by their number; None if there are none."""

post_accumulate_hooks: Final = attrgetter("_post_accumulate_grad_hooks")
"""The hooks of a leaf that run after its gradient was accumulated, by their number; None if there are none."""

sequence_number: Final = methodcaller("_sequence_nr")
"""The place of a node in the order in which the engine runs those that are ready: the highest number first."""


def set_sequence_number(node: Any, number: int) -> None:
    """Move a node in the order of the engine."""
    node._set_sequence_nr(number)


def current_engine_run() -> int:
    """Return the number of the engine's run that this thread is in, -1 outside of any run."""
    run: int = torch._C._current_graph_task_id()
    return run
