"""The systems that are compared: the contract of their code, and the registry of their configurations."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, cast

__all__ = [
    "BULK_MINIMUM_CALLS",
    "REGISTRY",
    "TORCH_THREADS",
    "WARM_UP_SHARE",
    "Caller",
    "Configuration",
    "Measurement",
    "System",
    "bulk_warm_up_calls",
    "load",
]

Measurement = dict[str, float]
"""Figures by name, with the unit in the name: ``p50_us``, ``calls_per_s``."""

WARM_UP_SHARE: Final = 0.2
"""How long a cell is warmed up, by calls that do not count, as a part of its measured time."""

BULK_MINIMUM_CALLS: Final = 2

TORCH_THREADS: Final = 2


class Caller(Protocol):
    """The measuring side. Every method named by a row's `Workload.measure` is a coroutine that returns a `Measurement`.

    These two every system has; others (`bulk`, `flood`, ...) only those whose rows ask for them.
    """

    async def latency(self, *, function: str, flavour: str, payload: str, budget_s: float) -> Measurement:
        """One call after another for `budget_s` seconds, after a warm-up: ``p50_us``, ``p99_us``."""
        ...

    async def throughput(
        self, *, function: str, flavour: str, payload: str, in_flight: int, budget_s: float
    ) -> Measurement:
        """A sliding window of `in_flight` calls for `budget_s` seconds, after a warm-up: ``calls_per_s``."""
        ...


class System(Protocol):
    """One peer in one configuration. Each side runs in a process of its own."""

    def run(self, main: Coroutine[object, object, None]) -> None:
        """Runs `main` on the event loop that a user of this system would choose."""
        ...

    def callee(self, place: Path) -> AbstractAsyncContextManager[None]:
        """Serves `functions.FUNCTIONS`. The two sides find each other through the directory `place`."""
        ...

    def caller(self, place: Path) -> AbstractAsyncContextManager[Caller]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """How to make a `System`, without importing it: the process that compares must stay small and idle."""

    module: str
    about: str
    settings: Mapping[str, object] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    spins_when_idle: bool = False
    """It burns CPU while nothing is asked of it, so that it is stopped while another system is measured."""

    def missing(self) -> tuple[str, ...]:
        """The packages that it needs and that are not installed."""
        return tuple(name for name in self.requires if importlib.util.find_spec(name) is None)


REGISTRY: Final[Mapping[str, Configuration]] = {
    "floor-unix": Configuration(
        module="scripts.bench.floor",
        about="a minimal uvloop protocol with C pickle and nothing else, unix socket",
        settings={"transport": "unix"},
        requires=("uvloop", "numpy"),
    ),
    "floor-tcp": Configuration(
        module="scripts.bench.floor",
        about="the same over TCP",
        settings={"transport": "tcp"},
        requires=("uvloop", "numpy"),
    ),
    "arpc-unix": Configuration(
        module="scripts.bench.arpc_peer",
        about="arpc, unix socket",
        settings={"listen": "unix://"},
        requires=("arpc", "torch"),
    ),
    "arpc-tcp": Configuration(
        module="scripts.bench.arpc_peer",
        about="arpc, TCP",
        settings={"listen": "tcp://127.0.0.1:0"},
        requires=("arpc", "torch"),
    ),
    "torch": Configuration(
        module="scripts.bench.torch_rpc",
        about=f"torch.distributed.rpc tuned for calls: {TORCH_THREADS} worker threads",
        settings={"threads": TORCH_THREADS},
        requires=("torch",),
        spins_when_idle=True,
    ),
    "torch-default": Configuration(
        module="scripts.bench.torch_rpc",
        about="torch.distributed.rpc with nothing set",
        requires=("torch",),
        spins_when_idle=True,
    ),
    "torch-tcp": Configuration(
        module="scripts.bench.torch_rpc",
        about=f"torch.distributed.rpc forced to TCP (transport uv, channel basic), {TORCH_THREADS} worker threads",
        settings={"threads": TORCH_THREADS, "transports": ["uv"], "channels": ["basic"]},
        requires=("torch",),
    ),
}


def bulk_warm_up_calls(size_bytes: int) -> int:
    """How many large transfers go before those that count. Of the largest, which take their time, one is enough."""
    return 2 if size_bytes <= 100_000_000 else 1


def load(name: str) -> System:
    """Imports the code of a system; called only in the processes that run it."""
    configuration = REGISTRY[name]
    make = cast("Callable[..., System]", importlib.import_module(configuration.module).system)
    return make(**configuration.settings)
