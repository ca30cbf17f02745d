"""torch.distributed.optim, on arpc: one optimizer over parameters that are on many workers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from torch.optim import Optimizer

from arpc.compat import current
from arpc.compat.drop_in import DropIn
from arpc.compat.failures import as_torch_error
from arpc.compat.loop_thread import refuse_loop_thread
from arpc.compat.rref import RRef
from arpc.errors import WorkersFailedError
from arpc.optim import DistributedOptimizer as AsyncOptimizer

__all__ = ["DistributedOptimizer"]

T = TypeVar("T")


class DistributedOptimizer:
    """One optimizer per owner of parameters; `step` runs them all with the gradients of an autograd context.

    `handle` is the underlying `arpc.optim.DistributedOptimizer`, which has state dicts and schedulers too.
    """

    def __init__(
        self, optimizer_class: Callable[..., Optimizer], params_rref: Sequence[RRef[Any]], *args: Any, **kwargs: Any
    ) -> None:
        self._drop_in: DropIn = current.get_agent().drop_in
        handles = [rref.handle for rref in params_rref]

        async def make() -> AsyncOptimizer:
            return await AsyncOptimizer(optimizer_class, handles, *args, **kwargs)

        self.handle: AsyncOptimizer = self._run(make)

    def step(self, context_id: int) -> None:
        """Make every owner take a step with the gradients of a context. Returns when all have."""
        self._run(lambda: self.handle.step(context_id))

    def _run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        refuse_loop_thread("await arpc.optim.DistributedOptimizer(...).step(context_id)")
        try:
            return self._drop_in.run(make)
        except WorkersFailedError as errors:
            # as in torch, the error of one worker is raised
            to = self._drop_in.peer(errors.failed[-1]).info
            raised = as_torch_error(errors.exceptions[-1], to, self._drop_in.agent.timeouts.default_s)
        raise raised
