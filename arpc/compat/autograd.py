"""Distributed autograd with torch's names.

The current autograd context is a context variable, so each thread has its own unless it runs in a copied context.
"""

# No postponed annotations: TorchScript reads the annotations of functions that it leaves to Python

from types import TracebackType
from typing import Any

from torch import Tensor

from arpc import torchjit
from arpc.autograd.contexts import AutogradContext, current_context_id
from arpc.autograd.nodes import SEND_NAME
from arpc.autograd.passes.plan import Send
from arpc.autograd.service import AutogradService
from arpc.compat import current, reducers
from arpc.compat.drop_in import DropIn
from arpc.compat.loop_thread import refuse_loop_thread
from arpc.compat.passes import run_pass
from arpc.ids import LOCAL_BITS

__all__ = ["DistAutogradContext", "backward", "context", "get_gradients", "is_available"]

reducers.install()


def is_available() -> bool:
    """Return True: arpc always has it."""
    return True


def _init(worker_id: int) -> None:
    """Check the id only: a worker of arpc has distributed autograd. Raises torch's `RuntimeError` for an invalid id."""
    if not 0 <= worker_id < 1 << 16:
        raise RuntimeError(f"worker_id needs to be in the range [0, 65535], not {worker_id}: pass rank to init_rpc")


def _drop_in() -> DropIn:
    drop_in: DropIn = current.get_agent().drop_in
    return drop_in


def _service() -> AutogradService:
    return _drop_in().worker.autograd


class _SendFunction:
    """A message with tensors that left this worker, as torch shows it. The node in the graph serves engines only."""

    def __init__(self, send: Send) -> None:
        self.next_functions = tuple(send.edges)
        """The edges that the tensors came from."""

    def name(self) -> str:
        return SEND_NAME


class DistAutogradContext:
    """The view that torch's API has of this worker's record of a context."""

    def __init__(self, context: AutogradContext) -> None:
        self._context = context

    def _context_id(self) -> int:
        return self._context.id

    def _send_functions(self) -> dict[int, Any]:
        """Return the nodes where tensors left, by message, in their order."""
        return {number: _SendFunction(send) for number, send in self._context.sends.copy().items()}

    def _recv_functions(self) -> dict[int, Any]:
        """Return the nodes where tensors came in, by message, in their order."""
        return dict(self._context.recvs)

    def _known_worker_ids(self) -> set[int]:
        return {worker for worker in self._context.known_workers if worker != _drop_in().info.id}


# -- contexts


class context:  # noqa: N801 - torch's name
    """``with context() as context_id:`` records the calls that this thread makes inside, for `backward`."""

    def __enter__(self) -> int:
        self.autograd_context = _new_context()
        return self.autograd_context._context_id()  # noqa: SLF001 - torch's name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _release_context(self.autograd_context._context_id())  # noqa: SLF001 - torch's name


def _new_context() -> DistAutogradContext:
    """Make a context in which this thread records from now on."""
    refuse_loop_thread("async with arpc.autograd.context() as context_id:")
    service = _service()
    outer = current_context_id.get()
    if outer is not None and outer in service.container.contexts:
        raise RuntimeError(f"Already have an autograd context id for this thread, cannot create a new one. id: {outer}")
    made = _drop_in().thread.call(service.container.new)
    current_context_id.set(made.id)
    return DistAutogradContext(made)


def _release_context(context_id: int) -> None:
    """End a context here. Other workers that know it are notified, without waiting for them."""
    refuse_loop_thread("async with arpc.autograd.context() as context_id:")
    service = _service()
    if current_context_id.get() == context_id:
        current_context_id.set(None)
    _drop_in().thread.call(lambda: service.lifetimes.release_nowait(context_id))


def _retrieve_context(context_id: int) -> DistAutogradContext:
    return DistAutogradContext(_service().container.find(context_id))


def _current_context() -> DistAutogradContext:
    context_id = current_context_id.get()
    if context_id is None:
        raise RuntimeError(
            "Current thread doesn't have a valid autograd context. Please wrap your code using: "
            "`with torch.distributed.autograd.context() as context_id` to generate a valid context"
        )
    return _retrieve_context(context_id)


def _is_valid_context(context_id: int) -> None:
    """Raise an error if there is no such context."""
    _service().container.find(context_id)


def _get_max_id() -> int:
    """Return the largest id that a context of this worker can have."""
    return (_drop_in().info.id << LOCAL_BITS) + (1 << LOCAL_BITS) - 1


def _get_debug_info() -> dict[str, str]:
    """Return counters under torch's names."""
    found = _drop_in().thread.call(_service().statistics)
    return {"num_current_backward_passes": str(found["passes"]), "num_autograd_contexts": str(found["contexts"])}


# -- passes


@torchjit.ignore
def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """Return the gradients that backward passes of a context have accumulated on this worker, by leaf."""
    return _service().gradients(context_id)


@torchjit.ignore
def _backward(context_id: int, roots: list[Tensor], retain_graph: bool) -> None:
    """Run `backward`. TorchScript's interpreter calls this function."""
    is_id = isinstance(context_id, int) and not isinstance(context_id, bool)
    if not is_id or not isinstance(roots, list | tuple) or not all(isinstance(root, Tensor) for root in roots):
        raise TypeError(
            "backward(): incompatible function arguments. The following argument types are supported: "
            "(context_id: int, roots: list[torch.Tensor], retain_graph: bool = False) -> None"
        )
    run_pass(_drop_in(), context_id, roots, retain_graph)


# TorchScript compiles it, so that scripts contain this name; an ignored function could not have a default
def dist_backward(context_id: int, roots: list[Tensor], retain_graph: bool = False) -> None:
    """Run a backward pass from scalar roots, over all workers that they depend on. Blocks until it is over.

    Raises RuntimeError, with the text of the error and the ids of the workers that it passed through.
    """
    _backward(context_id, roots, retain_graph)


backward = dist_backward
