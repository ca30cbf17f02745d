"""The public functions of distributed autograd. Each uses the worker of its context, like those of `arpc.api`."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from contextvars import Token
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from arpc.agent.scope import find_scope
from arpc.autograd.contexts import current_context_id
from arpc.autograd.service import AutogradService
from arpc.errors import AutogradError, NotInitializedError
from arpc.options import UNSET, Unset

__all__ = ["backward", "context", "get_gradients"]


def _service() -> AutogradService:
    scope = find_scope()
    if scope is None or scope.worker is None:
        raise NotInitializedError(
            "distributed autograd belongs to a worker, and this context has none: call arpc.init_rpc first"
        )
    service: AutogradService = scope.worker.autograd
    return service


class context:  # noqa: N801 - used like a function, as torch's own
    """``async with arpc.autograd.context() as ctx_id:`` records the calls made inside, for `backward`.

    ::

        async with arpc.autograd.context() as ctx_id:
            loss = (await arpc.rpc_sync("ps", torch.mul, (x, y))).sum()
            await arpc.autograd.backward(ctx_id, [loss])
            grads = arpc.autograd.get_gradients(ctx_id)

    It is a context variable: tasks started inside record in it too, other tasks do not. It is sent with calls, so that
    handlers, and the calls these make in turn, record in the same context. Leaving it releases everything that was
    recorded, on every worker it has reached, and waits for that, for a bounded time.
    """

    _service: AutogradService | None = None
    _context_id = -1
    _token: Token[int | None] | None = None

    if not TYPE_CHECKING:  # a type checker reports the mistake itself

        def __enter__(self) -> NoReturn:
            raise TypeError("it takes other workers to begin and to end it: use `async with arpc.autograd.context()`")

        def __exit__(self, *_: object) -> None:
            pass  # Python looks it up before it calls __enter__

    async def __aenter__(self) -> int:
        service = _service()
        outer = current_context_id.get()
        if outer is not None and outer in service.container.contexts:
            raise AutogradError(
                f"Already have an autograd context id for this thread of execution: {outer}. Contexts cannot be nested"
            )
        self._service = service
        context_id = self._context_id = service.container.new().id
        self._token = current_context_id.set(context_id)
        return context_id

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        service, token = self._service, self._token
        if service is None or token is None:
            return
        self._service = self._token = None
        try:
            current_context_id.reset(token)
        except ValueError:  # left in another Context than it was entered in, as fixtures do
            current_context_id.set(None)
        if others := service.lifetimes.end(self._context_id):
            service.lifetimes.agent.check_loop()
            await service.lifetimes.notify_all(others, self._context_id)


def backward(
    ctx_id: int, roots: Sequence[Tensor], retain_graph: bool = False, *, timeout: float | Unset = UNSET
) -> Coroutine[Any, Any, None]:
    """Run a backward pass from scalar roots, over all workers that they depend on. Gradients: see `get_gradients`.

    Every node of every worker's graph runs once, and results that no root depends on do no harm. The loop keeps serving
    meanwhile. ``retain_graph=True`` allows another pass over the same graph. ``timeout`` is in seconds, 0 for none;
    unset, it is `RpcOptions.rpc_timeout`.

    If anything fails, the pass ends on all workers and none of its gradients are kept. Raises `BackwardError` for an
    error of a node or hook on any worker, `WorkerLostError`, `RpcTimeoutError`, and `AutogradError` if a root is not
    valid, the context does not exist, or another pass of it is under way. Cancelling the call ends the pass as well.
    """
    service = _service()
    service.lifetimes.agent.check_loop()
    return service.backward(ctx_id, roots, retain_graph, timeout)


def get_gradients(ctx_id: int) -> dict[Tensor, Tensor]:
    """Return the gradients that backward passes of a context have accumulated on this worker, by leaf tensor.

    A leaf's ``.grad`` is never touched. Raises `AutogradError` if there is no such context on this worker.
    """
    return _service().gradients(ctx_id)
