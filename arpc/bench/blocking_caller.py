"""Measures a system without coroutines: one thread that blocks, and a sliding window of futures."""

from __future__ import annotations

import abc
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from arpc.bench import payloads
from arpc.bench.asyncio_caller import bulk_figures, latency_figures
from arpc.bench.functions import FUNCTIONS
from arpc.bench.systems import BULK_MINIMUM_CALLS, CALLEE, WARM_UP_SHARE, Measurement, bulk_warm_up_calls

__all__ = [
    "MINIMUM_WARM_UP_S",
    "BlockingCall",
    "BlockingCaller",
    "RpcCaller",
    "StartedCall",
    "Waitable",
    "in_threads",
    "one_by_one",
    "window",
]

MINIMUM_WARM_UP_S: Final = 0.1
"""The least warm-up: a system may have been stopped until now, and its threads need a moment to resume."""


class Waitable(Protocol):
    """The result of a call in flight."""

    def wait(self) -> object: ...


BlockingCall = Callable[[], object]
StartedCall = Callable[[], Waitable]


class BlockingCaller(abc.ABC):
    """The measurements that every system has. Nothing else runs on the loop meanwhile."""

    @abc.abstractmethod
    def prepare(self, function: str, payload: str) -> BlockingCall:
        """Return a blocking call of `function`."""

    @abc.abstractmethod
    def prepare_started(self, function: str, payload: str) -> StartedCall:
        """Return a call that returns at once with a future to wait for."""

    @abc.abstractmethod
    def prepare_bulk(self, function: str, size_bytes: int) -> BlockingCall:
        """Return a call with one array of `size_bytes` as its argument."""

    async def latency(self, *, function: str, flavour: str, payload: str, budget_s: float) -> Measurement:
        call = self.prepare(function, payload)
        if function == "echo" and not payloads.same_content(payloads.array_arguments(payload)[0], call()):
            raise RuntimeError(f"the echo of {payload} differs from what was sent")
        one_by_one(call, max(MINIMUM_WARM_UP_S, budget_s * WARM_UP_SHARE))
        return latency_figures(one_by_one(call, budget_s))

    async def throughput(
        self, *, function: str, flavour: str, payload: str, in_flight: int, budget_s: float
    ) -> Measurement:
        start = self.prepare_started(function, payload)
        window(start, in_flight, max(MINIMUM_WARM_UP_S, budget_s * WARM_UP_SHARE))
        return {"calls_per_s": window(start, in_flight, budget_s)}

    async def many_threads(
        self, *, function: str, flavour: str, payload: str, threads: int, budget_s: float
    ) -> Measurement:
        call = self.prepare(function, payload)
        in_threads(call, threads, max(MINIMUM_WARM_UP_S, budget_s * WARM_UP_SHARE))
        return {"calls_per_s": in_threads(call, threads, budget_s)}

    async def bulk(self, *, function: str, size_bytes: int, budget_s: float) -> Measurement:
        call = self.prepare_bulk(function, size_bytes)
        for _ in range(bulk_warm_up_calls(size_bytes)):
            call()
        samples = one_by_one(call, budget_s, minimum=BULK_MINIMUM_CALLS)
        self.prepare("forget", "none")()
        return bulk_figures(samples, size_bytes)


class RpcCaller(BlockingCaller):
    """Calls with the functions of torch.distributed.rpc, which the drop-in has too."""

    def __init__(self, rpc: Any) -> None:
        """``rpc`` is the module that has these functions."""
        self.rpc = rpc

    def prepare(self, function: str, payload: str) -> BlockingCall:
        return partial(self.rpc.rpc_sync, CALLEE, FUNCTIONS["def"][function], payloads.tensor_arguments(payload))

    def prepare_started(self, function: str, payload: str) -> StartedCall:
        return partial(self.rpc.rpc_async, CALLEE, FUNCTIONS["def"][function], payloads.tensor_arguments(payload))

    def prepare_bulk(self, function: str, size_bytes: int) -> BlockingCall:
        return partial(self.rpc.rpc_sync, CALLEE, FUNCTIONS["def"][function], (payloads.bulk_tensor(size_bytes),))


def one_by_one(call: BlockingCall, duration_s: float, minimum: int = 1) -> list[float]:
    """Make calls one after another. Return the seconds that each took; there are at least `minimum` calls."""
    clock = time.perf_counter
    samples: list[float] = []
    now = clock()
    end = now + duration_s
    while now < end or len(samples) < minimum:
        begin = clock()
        call()
        now = clock()
        samples.append(now - begin)
    return samples


def in_threads(call: BlockingCall, threads: int, duration_s: float) -> float:
    """Return the calls per second of `threads` threads, each of which makes one call after the other."""
    clock = time.perf_counter
    made = [0] * threads
    started = clock()
    end = started + duration_s

    def work(number: int) -> None:
        while clock() < end:
            call()
            made[number] += 1

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(made) / (clock() - started)


def window(start: StartedCall, in_flight: int, duration_s: float) -> float:
    """Return the calls per second with up to `in_flight` open futures. To wait for the oldest is the cheapest way."""
    clock = time.perf_counter
    under_way: deque[Waitable] = deque()
    done = 0
    started = clock()
    end = started + duration_s
    while clock() < end:
        if len(under_way) >= in_flight:
            under_way.popleft().wait()
            done += 1
        under_way.append(start())
    done += len(under_way)
    while under_way:
        under_way.popleft().wait()
    return done / (clock() - started)
