"""DDP in graphs that lead to other workers: its hooks are part of a backward pass, once it is known who has them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from arpc.autograd.heeded import heed_accumulate_hooks

__all__ = ["install"]


def install() -> None:
    """Notice every reducer that DDP makes from now on."""
    plain: Any = getattr(dist, "Reducer", None)
    if plain is None or getattr(plain, "_is_noticed", False):
        return

    class Reducer(plain):  # type: ignore[misc]
        """Torch's own, whose parameters are heeded by backward passes over several workers."""

        _is_noticed = True

        def __init__(self, params: Sequence[Any], *args: Any, **kwargs: Any) -> None:
            super().__init__(params, *args, **kwargs)
            flat = itertools.chain.from_iterable(params) if params and isinstance(params[0], list | tuple) else params
            heed_accumulate_hooks(parameter for parameter in flat if parameter.requires_grad)

    dist.Reducer = Reducer  # type: ignore[attr-defined]
