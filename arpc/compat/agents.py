"""The RPC agent, as scripts of torch.distributed.rpc know it."""

from __future__ import annotations

import time
from typing import Any, Final

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from arpc.compat.calls import call_async
from arpc.compat.drop_in import DropIn
from arpc.compat.goodbye import Goodbye
from arpc.compat.rref import RRef
from arpc.compat.start_order import StartOrder
from arpc.compat.workers import WorkerInfo
from arpc.ids import address_of
from arpc.rref.handle import RRef as Handle
from arpc.rref.report import RRefRow, rref_statistics

__all__ = ["RpcAgent", "TensorPipeAgent"]

_ATTEMPTS: Final = 8


async def _type_of_value(rref: Handle[Any]) -> type:
    return type(await rref.local_value())


def _rref_typeof_on_owner(rref: RRef[Any] | Handle[Any], blocking: bool = True) -> Any:
    """Return the type of an RRef's value. Runs on the owner, which need not be a drop-in."""
    if isinstance(rref, Handle):
        return _type_of_value(rref)
    kind = type(rref.local_value())
    if blocking:
        return kind
    future: torch.futures.Future[type] = torch.futures.Future()
    future.set_result(kind)
    return future


def _interpreter_wait_us() -> float:
    """Return how long a thread that has released the GIL waits to get it back: the average of a few attempts."""
    waits = []
    for _ in range(_ATTEMPTS):
        begin = time.perf_counter()
        time.sleep(0)
        waits.append(time.perf_counter() - begin)
    return sum(waits) / len(waits) * 1e6


class RpcAgent:
    """The base class of every agent, including those of other backends that programs register."""


class TensorPipeAgent(RpcAgent):
    """A worker of arpc under the class name that scripts expect. Only the backend makes one."""

    def __init__(self, drop_in: DropIn, store: Store, *, is_static_group: bool) -> None:
        self.drop_in = drop_in
        self.store = store
        self.is_static_group = is_static_group
        self.is_gil_profiled = False
        self.goodbye: Goodbye | None = None
        self.start_order: StartOrder | None = None
        self.backend_options: Any = None
        self.blocking_names: set[str] = {drop_in.info.name}
        """The names of the workers that are drop-ins too, and so take part in `_all_gather`."""

    @property
    def name(self) -> str:
        return self.drop_in.info.name

    # -- workers

    def get_worker_info(self, worker: str | int | None = None) -> WorkerInfo:
        """Return the name and id of a worker; of this one if none is given."""
        return WorkerInfo.of(self.drop_in.info if worker is None else self.drop_in.peer(worker).info)

    def get_worker_infos(self) -> list[WorkerInfo]:
        return [WorkerInfo.of(info) for info in self.drop_in.infos()]

    def _get_device_map(self, to: WorkerInfo) -> dict[torch.device, torch.device]:
        maps = self.drop_in.worker.options.device_maps
        return {torch.device(here): torch.device(there) for here, there in maps.get(to.name, {}).items()}

    def start_in_order(self) -> None:
        """Wait until rank 0 has started; on rank 0, release the others. The last step of `init_rpc`."""
        if self.start_order is None:
            return
        if self.drop_in.info.id == 0:
            self.start_order.release(self.drop_in.thread)
        else:
            self.start_order.wait()

    def _get_backend_options(self) -> Any:
        """Return the options that were passed to `init_rpc`."""
        return self.backend_options

    # -- requests

    def type_of(self, rref: RRef[Any], timeout: float) -> torch.futures.Future[type]:
        """Ask the owner of an RRef for the type of its value."""
        if rref.is_owner():
            future: torch.futures.Future[type] = _rref_typeof_on_owner(rref, blocking=False)
            return future
        peer = self.drop_in.peer(address_of(rref.handle.owner()))
        return call_async(self.drop_in, peer, _rref_typeof_on_owner, (rref,), None, timeout, anchor=rref)

    @property
    def rpc_timeout(self) -> float:
        return self.drop_in.agent.timeouts.default_s

    def set_rpc_timeout(self, timeout_s: float) -> None:
        agent = self.drop_in.agent
        self.drop_in.thread.call(lambda: setattr(agent.timeouts, "default_s", timeout_s))

    # -- statistics

    def get_debug_info(self) -> dict[str, str]:
        """Return counters under torch's names."""
        figures = self.drop_in.thread.call(self._figures)
        return {f"agent.{name}": str(value) for name, value in figures.items()}

    get_metrics = get_debug_info

    def _figures(self) -> dict[str, Any]:
        agent = self.drop_in.agent
        executor = agent.dispatcher
        running = sum(len(link.running) for link in agent.connector.links)
        figures: dict[str, Any] = {
            "thread_pool_size": self.drop_in.worker.options.num_worker_threads,
            "num_idle_threads": executor.threads.idle_threads,
            "client_active_calls": sum(peer.calls_in_flight for peer in agent.peers),
            "server_active_calls": running,
            "server_active_async_calls": sum(
                run.function.returns_future for link in agent.connector.links for run in [*link.running.values()]
            ),
        }
        if self.is_gil_profiled:
            figures["gil_average_wait_time_us"] = _interpreter_wait_us()
        return figures

    def get_rref_debug_info(self) -> dict[str, str]:
        """Return counters of RRefs under torch's names."""
        return {name: str(number) for name, number in self.drop_in.thread.call(self._rref_figures).items()}

    def _rref_figures(self) -> dict[str, int]:
        context = self.drop_in.worker.rref_context
        names = ("num_pending_users", "num_pending_futures", "num_forks")
        found = rref_statistics(context)
        # a value that no other worker uses is not counted, even if this process has an RRef to it
        owned = sum(bool(owned.forks) for owned in context.forks.owned.values())
        return {"num_owner_rrefs": owned, **{name: found[name] for name in names}}

    # -- shutdown

    def leaked_rrefs(self) -> tuple[RRefRow, ...]:
        """Return the values of this worker that other workers still held when the group had no call in flight."""
        return self.drop_in.worker.surviving_rrefs

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Wait until no call from or to this worker is in flight; with ``shutdown``, leave the group."""
        if shutdown:
            self.drop_in.shutdown(graceful=True, timeout_s=timeout)
            if self.goodbye is not None:
                self.goodbye.say()
        else:
            self.drop_in.run(lambda: self.drop_in.agent.drain(timeout or None))

    def sync(self) -> None:
        """Wait until no call from or to this worker is in flight."""
        self.join()

    def shutdown(self) -> None:
        """Leave the group without waiting for other workers."""
        if not self.drop_in.worker.is_shut_down:
            self.drop_in.shutdown(graceful=False, timeout_s=0)
