"""The systems that are compared: the contract of their code, and the registry of their configurations.

A peer is a module with a function ``system(**settings)`` that makes a `System`, and an entry in `REGISTRY`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Protocol, cast, runtime_checkable

__all__ = [
    "BULK_MINIMUM_CALLS",
    "CALLEE",
    "DEFAULT_ROUNDS",
    "GRADIENTS_GROUP",
    "GROUP_SIZES",
    "PEERS",
    "QUICK_ROUNDS",
    "REGISTRY",
    "TORCH_GROUP_SIZES",
    "TORCH_THREADS",
    "TORCH_THREADS_TRIED",
    "WARM_UP_SHARE",
    "Caller",
    "Configuration",
    "GroupSystem",
    "Measurement",
    "System",
    "bulk_warm_up_calls",
    "callee_name",
    "load",
]

Measurement = dict[str, float]
"""Figures by name, with the unit in the name: ``p50_us``, ``calls_per_s``."""

DEFAULT_ROUNDS: Final = 7
QUICK_ROUNDS: Final = 3

WARM_UP_SHARE: Final = 0.2
"""The warm-up of a cell, by calls that do not count, as a fraction of its measured time."""

BULK_MINIMUM_CALLS: Final = 2

TORCH_THREADS: Final = 2
TORCH_THREADS_TRIED: Final = (2, 3, 4)
TORCH_THREADS_APART: Final = 3
"""The number of threads with which the goals for shapes were set."""

GROUP_SIZES: Final = (2, 4, 8, 16, 32, 64)
TORCH_GROUP_SIZES: Final = (2, 4, 8)
"""Each idle process of torch spins on a CPU: a larger group would measure the scheduler."""


GRADIENTS_GROUP: Final = 9
"""Workers of the group in which gradients go from one to eight and back."""

CALLEE: Final = "callee"


class Caller(Protocol):
    """The measuring side. Every method named by a row's `Workload.measure` is a coroutine that returns a `Measurement`.

    Every system has these two; only those whose rows need them have others (`bulk`, `flood`, ...).
    """

    async def latency(self, *, function: str, flavour: str, payload: str, budget_s: float) -> Measurement:
        """Measure one call after another for `budget_s` seconds, after a warm-up: ``p50_us``, ``p99_us``."""
        ...

    async def throughput(
        self, *, function: str, flavour: str, payload: str, in_flight: int, budget_s: float
    ) -> Measurement:
        """Measure a sliding window of `in_flight` calls for `budget_s` seconds, after a warm-up: ``calls_per_s``."""
        ...


class System(Protocol):
    """One peer in one configuration. Each side runs in a process of its own."""

    def run(self, main: Coroutine[object, object, None]) -> None:
        """Run `main` on the event loop that a user of this system would choose."""
        ...

    def callee(self, place: Path) -> AbstractAsyncContextManager[None]:
        """Serve `functions.FUNCTIONS`. The two sides find each other through the directory `place`."""
        ...

    def caller(self, place: Path) -> AbstractAsyncContextManager[Caller]: ...


@runtime_checkable
class GroupSystem(System, Protocol):
    """A system that may have several callees."""

    def others(self, place: Path) -> AbstractContextManager[None]:
        """Run all callees but the first, forked from it: entered in the first callee's process before `run`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The settings of a `System`, without importing it: the main process must stay small and idle."""

    module: str
    about: str
    settings: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables of its processes."""
    requires: tuple[str, ...] = ()
    spins_when_idle: bool = False
    """True if it uses a CPU while idle, so that it is stopped while another system is measured."""
    timeout_s: float = 600.0
    """Seconds after which a measurement counts as hung."""
    forks: bool = True
    """Whether its processes are forked from one that has imported torch; else each starts its own interpreter."""
    transient: bool = False
    """True if it is too large to stay: it is started for each measurement and ended after it."""

    def missing(self) -> tuple[str, ...]:
        """Return the packages that it needs and that are not installed."""
        return tuple(name for name in self.requires if importlib.util.find_spec(name) is None)


_FLOOR: Final = partial(Configuration, module="arpc.bench.floor", requires=("uvloop", "numpy"))
_RAW: Final = partial(Configuration, module="arpc.bench.raw_sockets", requires=("numpy",))
_ARPC: Final = partial(Configuration, module="arpc.bench.arpc_peer", requires=("arpc", "torch"))
_TORCH: Final = partial(Configuration, module="arpc.bench.torch_rpc", requires=("torch",))


def _groups() -> Iterator[tuple[str, Configuration]]:
    for workers in (*GROUP_SIZES, GRADIENTS_GROUP):
        settings: dict[str, object] = {"peers": workers - 1}
        about = f"a group of {workers} workers"
        yield (
            f"arpc-group-{workers}",
            _ARPC(about=f"arpc, {about}", settings=settings | {"listen": "unix://"}, transient=True),
        )
        yield (
            f"floor-group-{workers}",
            _FLOOR(about=f"the floor, {about}", settings=settings | {"transport": "unix"}, transient=True),
        )
        if workers in {*TORCH_GROUP_SIZES, GRADIENTS_GROUP}:
            yield (
                f"torch-group-{workers}",
                _TORCH(about=f"torch, {about}", settings=settings | {"threads": TORCH_THREADS}, transient=True),
            )


_PEER: Final = partial(Configuration, timeout_s=60.0)
_PEER_WITH_PROCESSES: Final = partial(_PEER, forks=False)
"""Peers that themselves start the processes between which calls are made."""

PEERS: Final[Mapping[str, Configuration]] = {
    "rpyc": _PEER(
        module="arpc.bench.peers.rpyc_service",
        about="RPyC: a service over a unix socket, asynchronous proxies, no compression, tensors in pieces",
        requires=("rpyc",),
    ),
    "grpc": _PEER(
        module="arpc.bench.peers.grpc_aio",
        about="grpc.aio: one unary method over a unix socket, tensors as bytes without protobuf",
        requires=("grpc",),
    ),
    "xoscar": _PEER_WITH_PROCESSES(
        module="arpc.bench.peers.xoscar_actor",
        about="xoscar: an actor in the second process of a pool, tensors as numpy arrays",
        requires=("xoscar",),
    ),
    "ray": _PEER_WITH_PROCESSES(
        module="arpc.bench.peers.ray_actor",
        about="Ray: an async actor, tensors as numpy arrays, which go through its shared memory",
        requires=("ray",),
    ),
    "monarch": _PEER_WITH_PROCESSES(
        module="arpc.bench.peers.monarch_actor",
        about="Monarch: an actor in a process of its own",
        requires=("monarch",),
    ),
    "dask": _PEER_WITH_PROCESSES(
        module="arpc.bench.peers.dask_actor",
        about="Dask: an actor on a worker process, asynchronous client, tensors as numpy arrays",
        requires=("distributed",),
    ),
}
"""The peers, which are measured if they are installed; ``make bench-peers`` installs them."""

REGISTRY: Final[Mapping[str, Configuration]] = {
    "floor-unix": _FLOOR(
        about="a minimal uvloop protocol with C pickle and nothing else, unix socket", settings={"transport": "unix"}
    ),
    "floor-apart": _FLOOR(
        about="the minimal uvloop protocol with C pickle, unix socket, processes started apart",
        settings={"transport": "unix"},
        forks=False,
    ),
    "floor-tcp": _FLOOR(about="the same over TCP", settings={"transport": "tcp"}),
    "raw-unix": _RAW(about="blocking sockets and nothing else, unix", settings={"transport": "unix"}),
    "raw-tcp": _RAW(about="the same over TCP", settings={"transport": "tcp"}),
    "arpc-unix": _ARPC(about="arpc, unix socket", settings={"listen": "unix://"}),
    "arpc-tcp": _ARPC(about="arpc, TCP", settings={"listen": "tcp://127.0.0.1:0"}),
    "arpc-limited": _ARPC(
        about="arpc, unix socket, 64 calls in flight at most",
        settings={"listen": "unix://", "max_calls_in_flight": 64},
    ),
    "arpc-socket": _ARPC(
        about="arpc, unix socket, tensors not through shared memory",
        settings={"listen": "unix://"},
        environment={"ARPC_SHARED_MEMORY_BYTES": "0"},
    ),
    "arpc-apart": _ARPC(
        about="arpc, unix socket, processes started apart", settings={"listen": "unix://"}, forks=False
    ),
    "arpc-three": _ARPC(
        about="arpc, unix socket, a caller and three callees, started apart",
        settings={"listen": "unix://", "peers": 3},
        forks=False,
    ),
    "arpc-compat": Configuration(
        module="arpc.bench.drop_in",
        requires=("arpc", "torch"),
        about="arpc.compat, the drop-in for torch.distributed.rpc, as it comes",
    ),
    "torch": _TORCH(
        about=f"torch.distributed.rpc tuned for calls: {TORCH_THREADS} worker threads",
        settings={"threads": TORCH_THREADS},
        spins_when_idle=True,
    ),
    "torch-apart": _TORCH(
        about=f"torch.distributed.rpc, {TORCH_THREADS_APART} worker threads, processes started apart",
        settings={"threads": TORCH_THREADS_APART},
        spins_when_idle=True,
        forks=False,
    ),
    "torch-three": _TORCH(
        about=f"torch.distributed.rpc, {TORCH_THREADS_APART} worker threads, a caller and three callees, started apart",
        settings={"threads": TORCH_THREADS_APART, "peers": 3},
        spins_when_idle=True,
        forks=False,
    ),
    "torch-default": _TORCH(about="torch.distributed.rpc with nothing set", spins_when_idle=True),
    "torch-tcp": _TORCH(
        about=f"torch.distributed.rpc forced to TCP (transport uv, channel basic), {TORCH_THREADS} worker threads",
        settings={"threads": TORCH_THREADS, "transports": ["uv"], "channels": ["basic"]},
    ),
    **{
        f"torch-{threads}threads": _TORCH(
            about=f"torch.distributed.rpc, {threads} worker threads",
            settings={"threads": threads},
            spins_when_idle=True,
        )
        for threads in TORCH_THREADS_TRIED
        if threads != TORCH_THREADS
    },
    **dict(_groups()),
    **PEERS,
}


def bulk_warm_up_calls(size_bytes: int) -> int:
    """Return how many large transfers precede those that count. One is enough of the largest, which take long."""
    return 2 if size_bytes <= 100_000_000 else 1


def callee_name(peer: int) -> str:
    """Return the name of a callee by its index, where there are several."""
    return CALLEE if peer == 0 else f"{CALLEE}{peer}"


def load(name: str) -> System:
    """Import and make a system; called only in the processes that run it."""
    configuration = REGISTRY[name]
    make = cast("Callable[..., System]", importlib.import_module(configuration.module).system)
    return make(**configuration.settings)
