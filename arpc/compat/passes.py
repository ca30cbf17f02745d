"""Backward passes for code that blocks: this worker's part of a pass runs in the thread that waits for it.

So nodes and hooks find the state of that thread, such as its profiler, and may block and make calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

import torch
from torch import Tensor

from arpc.autograd.nodes import SEND_NAME
from arpc.autograd.service import AutogradService
from arpc.compat.drop_in import DropIn
from arpc.compat.failures import as_torch_error
from arpc.compat.loop_thread import Outcome, refuse_loop_thread
from arpc.errors import ArpcError, BackwardError, CallError, RpcTimeoutError
from arpc.private.torch import is_profiled
from arpc.rref.handle import RRef

__all__ = ["run_pass", "run_pass_from"]

_NAME: Final = "torch::distributed::autograd::backward"


class _ServingOutcome(Outcome[None]):
    """The outcome of a pass. The thread that waits for it meanwhile runs the functions of the pass."""

    __slots__ = ("_jobs", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._jobs: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = SimpleQueue()

    def call(self, function: Callable[[], Any], /) -> asyncio.Future[Any]:
        """Run a function in the waiting thread; return a future of the loop for its end. Called on the loop."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._jobs.put((function, future))
        return future

    def set(self, value: None) -> None:
        super().set(value)
        self._jobs.put(None)

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self._jobs.put(None)

    def wait(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._run(*job)
            del job
        super().wait()

    def _run(self, function: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001 - it fails the pass, which raises it here in the end
            self._loop.call_soon_threadsafe(_settle, future, error)
        except BaseException as error:  # the waiting thread is interrupted, not the loop
            self._loop.call_soon_threadsafe(_settle, future, RuntimeError(f"interrupted by {error!r}"))
            raise
        else:
            self._loop.call_soon_threadsafe(_settle, future, None)


def _settle(future: asyncio.Future[Any], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def run_pass(drop_in: DropIn, context_id: int, roots: Sequence[Tensor], retain_graph: bool) -> None:
    """Run `arpc.autograd.backward`, and raise torch's errors."""
    if is_profiled():
        with torch.profiler.record_function(_NAME), _sends_shown(drop_in, context_id):
            _run_pass(drop_in, context_id, roots, retain_graph)
    else:
        _run_pass(drop_in, context_id, roots, retain_graph)


@contextmanager
def _sends_shown(drop_in: DropIn, context_id: int) -> Iterator[None]:
    """Record an event in the profile for each send that gradients came back to: no node runs there."""
    context = drop_in.worker.autograd.container.find(context_id)
    before = context.sends_used
    yield
    for _ in range(context.sends_used - before):
        with torch.profiler.record_function(SEND_NAME):
            pass


def _run_pass(drop_in: DropIn, context_id: int, roots: Sequence[Tensor], retain_graph: bool) -> None:

    def start(service: AutogradService, outcome: _ServingOutcome) -> Coroutine[Any, Any, None]:
        timeout_s = drop_in.agent.timeouts.default_s
        return service.backward(context_id, roots, retain_graph, timeout_s, outcome)

    _wait(drop_in, start)


def run_pass_from(drop_in: DropIn, rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    """Run `RRef.backward`, and raise torch's errors."""

    def start(service: AutogradService, outcome: _ServingOutcome) -> Coroutine[Any, Any, None]:
        return service.backward_from(rref, context_id, retain_graph, drop_in.agent.timeouts.default_s, outcome)

    _wait(drop_in, start)


def _wait(drop_in: DropIn, start: Callable[[AutogradService, _ServingOutcome], Coroutine[Any, Any, None]]) -> None:
    refuse_loop_thread("await arpc.autograd.backward(...)")
    outcome = _ServingOutcome(drop_in.thread.loop)
    try:
        drop_in.thread.run(partial(start, drop_in.worker.autograd, outcome), outcome=outcome)
    except ArpcError as error:
        raised = _in_torchs_words(error, drop_in)
    else:
        return
    raise raised


def _in_torchs_words(error: ArpcError, drop_in: DropIn) -> BaseException:
    if isinstance(error, BackwardError):  # torch names every worker that the error passed
        made = RuntimeError("".join(f"Error on Node {worker}: " for worker in error.path) + error.reason)
    elif isinstance(error, CallError) and not isinstance(error, RpcTimeoutError):
        made = RuntimeError(str(error))
    else:
        return as_torch_error(error, drop_in.info, drop_in.agent.timeouts.default_s)
    made.__cause__ = error
    return made
