"""Whether tensors are like those that came before, found out in one step for all of them.

What has to be looked at before the memory of a tensor is copied (its class, device, dtype, shape and strides, whether
it requires grad or is the lazy negative or conjugate of its memory, whether a mode or a transform of torch stands
before it) takes a call for each, and each of them as long as the copy. Torch's compiler has the same question, and has
it answered in C++.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = ["fits_like", "fits_nothing"]


def fits_nothing(*_: Any) -> bool:
    """For tensors that have to be looked at each time."""
    return False


def fits_like(examples: Sequence[Tensor]) -> Callable[..., bool]:
    """Tells whether tensors are contiguous, of the looks of the examples, and none of them is there twice.

    They must have a shape and an address, as sparse and nested ones have not, or the process may be aborted: what torch
    raises there, nobody catches. False means nothing: it may be that the mode is another one. The examples must be
    contiguous, and are not kept.
    """
    return _fits_like(examples) if _is_reliable else fits_nothing


def _fits_like(examples: Sequence[Tensor]) -> Callable[..., bool]:
    sizes = [[*example.shape] for example in examples]
    strides = [_contiguous(size) for size in sizes]
    compare: Any = torch._C._dynamo.guards.TensorGuards  # noqa: SLF001
    fits: Callable[..., bool] = compare(*examples, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return fits


def _contiguous(sizes: Sequence[int]) -> list[int]:
    """The strides of a contiguous tensor. Without making one, which whoever watches torch's operations would see."""
    following = [max(size, 1) for size in sizes[1:]]
    return [prod(following[place:]) for place in range(len(sizes))]


def _find_out_whether_reliable() -> bool:
    """Nobody has promised that this stays as it is, so it is put to the test."""
    plain, other = torch.ones(2, 2), torch.ones(2, 2)
    try:
        fits, fits_both = _fits_like([plain]), _fits_like([plain, plain.double().requires_grad_()])
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
        complex_ = plain.to(torch.complex64)
        others.append(_fits_like([complex_])(complex_.conj()))
        return fits(other) and fits_both(other, requiring.double().detach().requires_grad_()) and not any(others)
    except Exception:  # noqa: BLE001 - whatever it is, it is not what was expected
        return False


_is_reliable: Final = _find_out_whether_reliable()
