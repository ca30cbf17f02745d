"""Backward passes for threads that block: what runs of one on this worker runs in the thread that waits for it.

So nodes and hooks find what belongs to that thread, its profiler for one, and may block and call on as they like.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from arpc.autograd.service import AutogradService
from arpc.compat.drop_in import DropIn
from arpc.compat.failures import as_torch_error
from arpc.compat.loop_thread import Outcome, refuse_loop_thread
from arpc.errors import BackwardError
from arpc.rref.handle import RRef

__all__ = ["run_pass", "run_pass_from"]

_NAME = "torch::distributed::autograd::backward"


class _ServingOutcome(Outcome[None]):
    """The end of a pass. Whoever waits for it runs meanwhile what the pass gives them to run."""

    __slots__ = ("_jobs", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._jobs: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = SimpleQueue()

    def call(self, function: Callable[[], Any], /) -> asyncio.Future[Any]:
        """A future of the loop for a function run in the thread that waits. Called on the loop."""
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
        except Exception as error:  # noqa: BLE001 - it fails the pass, and so is raised here in the end
            self._loop.call_soon_threadsafe(_settle, future, error)
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
    """`arpc.autograd.backward`, raising in torch's words."""

    def start(service: AutogradService, outcome: _ServingOutcome) -> Coroutine[Any, Any, None]:
        timeout_s = drop_in.agent.default_timeout
        return service.backward(context_id, roots, retain_graph=retain_graph, timeout=timeout_s, threads=outcome)

    _wait(drop_in, start)


def run_pass_from(drop_in: DropIn, rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    """`RRef.backward`, raising in torch's words."""

    def start(service: AutogradService, outcome: _ServingOutcome) -> Coroutine[Any, Any, None]:
        return service.backward_from(rref, context_id, retain_graph, drop_in.agent.default_timeout, outcome)

    _wait(drop_in, start)


def _wait(
    drop_in: DropIn, start: Callable[[AutogradService, _ServingOutcome], Coroutine[Any, Any, None]]
) -> None:
    refuse_loop_thread("await arpc.autograd.backward(...)")
    outcome = _ServingOutcome(drop_in.thread.loop)
    try:
        with torch.profiler.record_function(_NAME):
            drop_in.thread.run(partial(start, drop_in.worker.autograd, outcome), outcome=outcome)
    except BackwardError as error:
        raised: BaseException = _in_torchs_words(error)
    except Exception as error:  # noqa: BLE001 - it is translated
        raised = as_torch_error(error, drop_in.info, drop_in.agent.default_timeout)
    else:
        return
    raise raised


def _in_torchs_words(error: BackwardError) -> RuntimeError:
    """Torch names every worker that an error came by."""
    made = RuntimeError("".join(f"Error on Node {worker}: " for worker in error.path) + error.reason)
    made.__cause__ = error
    return made
