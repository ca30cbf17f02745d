"""Undocumented APIs of torch: each is probed at import, and has a fallback that uses documented APIs only.

``ARPC_PUBLIC_APIS=1`` in the environment turns them off; `private_apis` says which are on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from arpc.private.switch import PUBLIC_ONLY

__all__ = ["fits_like", "fits_nothing", "private_apis"]


def private_apis() -> dict[str, bool]:
    """Which undocumented APIs of torch are in use."""
    return {"TensorGuards": _uses_guards}


def fits_nothing(*_: Any) -> bool:
    """Recognize no tensors: the caller compares their attributes one by one."""
    return False


def fits_like(examples: Sequence[Tensor]) -> Callable[..., bool]:
    """A function that tells, in one call, whether tensors look like the examples.

    It compares class, device, dtype, shape, strides, ``requires_grad`` and the lazy conjugate and negative bits, and
    that no tensor is there twice, as torch's compiler does before it runs compiled code. False proves nothing: another
    mode of torch may be active, or `TensorGuards` may be off. The examples must be contiguous. They are not kept alive.

    The function must not be called with nested tensors: torch would abort the process.
    """
    return _guard(examples) if _uses_guards else fits_nothing


def _guard(examples: Sequence[Tensor]) -> Callable[..., bool]:
    sizes = [[*example.shape] for example in examples]
    strides = [_contiguous(size) for size in sizes]
    guards: Any = torch._C._dynamo.guards.TensorGuards  # noqa: SLF001
    check: Callable[..., bool] = guards(*examples, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


def _contiguous(sizes: Sequence[int]) -> list[int]:
    """The strides of a contiguous tensor, computed: to make one is an operation that modes and profilers would see."""
    following = [max(size, 1) for size in sizes[1:]]
    return [prod(following[place:]) for place in range(len(sizes))]


def _guards_are_reliable() -> bool:
    """Whether `TensorGuards` tells apart what must be told apart, in this version of torch."""
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
                torch._efficientzerotensor(2, 2),  # noqa: SLF001
                None,
            )
        ]
        others.append(_guard([plain, other])(plain, plain))
        complex_ = plain.to(torch.complex64)
        others.append(_guard([complex_])(complex_.conj()))
        return fits(other) and fits_both(other, requiring.double().detach().requires_grad_()) and not any(others)
    except Exception:  # noqa: BLE001 - any error means that this version is not the one that is expected
        return False


_uses_guards: Final = not PUBLIC_ONLY and _guards_are_reliable()
