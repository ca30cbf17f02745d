"""DDP in graphs that lead to other workers: backward passes run the hooks of its parameters."""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Sequence
from typing import Any, Final

import torch.distributed as dist

from arpc.autograd.engine.accumulate_hooks import heed_accumulate_hooks

__all__ = ["install"]

# Torch ends a process group with the last reference to it. If a reducer has that one, it waits for the group's threads
# while it holds the GIL, which these may need in order to end: so this list has one too, a little longer.
_outliving: Final[list[Any]] = []
atexit.register(_outliving.clear)


def install() -> None:
    """Register the parameters of every reducer that DDP makes from now on."""
    plain: Any = getattr(dist, "Reducer", None)
    if plain is None or getattr(plain, "_is_noticed", False):
        return

    class Reducer(plain):  # type: ignore[misc]
        """Torch's own reducer. Backward passes over several workers run the hooks of its parameters."""

        _is_noticed = True

        def __init__(self, params: Sequence[Any], *args: Any, **kwargs: Any) -> None:
            super().__init__(params, *args, **kwargs)
            _outliving.clear()
            self._groups = [each for each in (*args, *kwargs.values()) if isinstance(each, dist.ProcessGroup)]
            flat = itertools.chain.from_iterable(params) if params and isinstance(params[0], list | tuple) else params
            heed_accumulate_hooks(parameter for parameter in flat if parameter.requires_grad)

        def __del__(self) -> None:
            _outliving.extend(self.__dict__.get("_groups", ()))

    dist.Reducer = Reducer  # type: ignore[attr-defined]
