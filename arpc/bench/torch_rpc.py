"""torch.distributed.rpc, used as well as its blocking surface allows: a sliding window of futures, never a barrier."""

from __future__ import annotations

import asyncio
import gc
import os
import time
import warnings
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch.distributed import rpc

from arpc.bench import memory, payloads
from arpc.bench.asyncio_caller import bulk_figures, latency_figures, start_memory_watch
from arpc.bench.functions import FUNCTIONS, big
from arpc.bench.systems import BULK_MINIMUM_CALLS, WARM_UP_SHARE, Measurement, bulk_warm_up_calls

__all__ = ["TorchRpc", "system"]

CALLEE = "callee"

MINIMUM_WARM_UP_S = 0.1
"""It was stopped until now; its threads need a moment to find their places again."""


class TorchCaller:
    """The measurements of `Caller`, blocking: nothing else runs on this loop."""

    async def latency(self, *, function: str, flavour: str, payload: str, budget_s: float) -> Measurement:
        arguments = payloads.tensor_arguments(payload)
        call = partial(rpc.rpc_sync, CALLEE, FUNCTIONS["def"][function], arguments)
        if function == "echo" and not payloads.same_content(arguments[0], call()):
            raise RuntimeError(f"the echo of {payload} differs from what was sent")
        _one_by_one(call, max(MINIMUM_WARM_UP_S, budget_s * WARM_UP_SHARE))
        return latency_figures(_one_by_one(call, budget_s))

    async def throughput(
        self, *, function: str, flavour: str, payload: str, in_flight: int, budget_s: float
    ) -> Measurement:
        start = partial(rpc.rpc_async, CALLEE, FUNCTIONS["def"][function], payloads.tensor_arguments(payload))
        _window(start, in_flight, max(MINIMUM_WARM_UP_S, budget_s * WARM_UP_SHARE))
        return {"calls_per_s": _window(start, in_flight, budget_s)}

    async def bulk(self, *, function: str, size_bytes: int, budget_s: float) -> Measurement:
        call = partial(rpc.rpc_sync, CALLEE, FUNCTIONS["def"][function], (payloads.bulk_tensor(size_bytes),))
        for _ in range(bulk_warm_up_calls(size_bytes)):
            call()
        samples: list[float] = []
        started = time.perf_counter()
        while len(samples) < BULK_MINIMUM_CALLS or time.perf_counter() - started < budget_s:
            begin = time.perf_counter()
            call()
            samples.append(time.perf_counter() - begin)
        rpc.rpc_sync(CALLEE, FUNCTIONS["def"]["forget"])
        return bulk_figures(samples, size_bytes)

    async def rref_latency(self, *, budget_s: float) -> Measurement:
        def call() -> object:
            return rpc.remote(CALLEE, FUNCTIONS["def"]["noop"]).to_here()

        _one_by_one(call, max(MINIMUM_WARM_UP_S, budget_s * WARM_UP_SHARE))
        return latency_figures(_one_by_one(call, budget_s))

    async def rref_fetch(self, *, size_bytes: int, budget_s: float) -> Measurement:
        rref = rpc.remote(CALLEE, big, (size_bytes,))
        rref.to_here()
        samples: list[float] = []
        started = time.perf_counter()
        while len(samples) < BULK_MINIMUM_CALLS or time.perf_counter() - started < budget_s:
            begin = time.perf_counter()
            rref.to_here()
            samples.append(time.perf_counter() - begin)
        return bulk_figures(samples, size_bytes)

    async def latency_under_load(self, *, flavour: str, size_bytes: int, budget_s: float) -> Measurement:
        call = partial(rpc.rpc_sync, CALLEE, FUNCTIONS["def"]["noop"])
        start = partial(rpc.rpc_async, CALLEE, FUNCTIONS["def"]["drop"], (payloads.bulk_tensor(size_bytes),))
        idle = latency_figures(_one_by_one(call, budget_s))
        transfer = start()

        def call_during_transfer() -> None:
            nonlocal transfer
            if transfer.done():
                transfer = start()
            call()

        loaded = latency_figures(_one_by_one(call_during_transfer, 2 * budget_s))
        transfer.wait()
        return loaded | {"times_idle": loaded["p50_us"] / idle["p50_us"]}

    async def flood(self, *, calls: int, callee_pid: int, budget_s: float) -> Measurement:
        start = partial(rpc.rpc_async, CALLEE, FUNCTIONS["def"]["noop"])
        _window(start, 16, budget_s)
        caller_before, callee_before = start_memory_watch(callee_pid)
        started = time.perf_counter()
        pending = [start() for _ in range(calls)]
        issued = time.perf_counter()
        for one in pending:
            one.wait()
        finished = time.perf_counter()
        return {
            "calls_per_s": calls / (finished - started),
            "total_s": finished - started,
            "issue_s": issued - started,
            "caller_bytes_per_call": (memory.peak_bytes(os.getpid()) - caller_before) / calls,
            "callee_growth_mb": (memory.peak_bytes(callee_pid) - callee_before) / 1e6,
        }

    async def soak(self, *, calls: int, in_flight: int, callee_pid: int, budget_s: float) -> Measurement:
        start = partial(rpc.rpc_async, CALLEE, FUNCTIONS["def"]["noop"])
        _window(start, in_flight, max(1.0, budget_s))
        caller_before, callee_before = start_memory_watch(callee_pid)
        started = time.perf_counter()
        window: deque[Any] = deque()
        for _ in range(calls):
            if len(window) >= in_flight:
                window.popleft().wait()
            window.append(start())
        while window:
            window.popleft().wait()
        elapsed_s = time.perf_counter() - started
        gc.collect()
        return {
            "calls_per_s": calls / elapsed_s,
            "caller_growth_mb": (memory.resident_bytes(os.getpid()) - caller_before) / 1e6,
            "callee_growth_mb": (memory.resident_bytes(callee_pid) - callee_before) / 1e6,
        }


def _one_by_one(call: Callable[[], object], duration_s: float) -> list[float]:
    clock = time.perf_counter
    samples: list[float] = []
    now = clock()
    end = now + duration_s
    while now < end:
        begin = clock()
        call()
        now = clock()
        samples.append(now - begin)
    return samples


def _window(start: Callable[[], Any], in_flight: int, duration_s: float) -> float:
    """Calls per second with up to `in_flight` futures open; waiting for the oldest is the cheapest way to have that."""
    clock = time.perf_counter
    window: deque[Any] = deque()
    done = 0
    started = clock()
    end = started + duration_s
    while clock() < end:
        if len(window) >= in_flight:
            window.popleft().wait()
            done += 1
        window.append(start())
    done += len(window)
    while window:
        window.popleft().wait()
    return done / (clock() - started)


class TorchRpc:
    """Two torch workers that meet through a file store; what is not set stays torch's default."""

    def __init__(
        self, threads: int | None = None, transports: list[str] | None = None, channels: list[str] | None = None
    ) -> None:
        self._settings: dict[str, Any] = {}
        if threads is not None:
            self._settings["num_worker_threads"] = threads
        if transports is not None:
            self._settings |= {"_transports": transports, "_channels": channels}

    def run(self, main: Coroutine[object, object, None]) -> None:
        asyncio.run(main)

    @asynccontextmanager
    async def callee(self, place: Path) -> AsyncIterator[None]:
        self._init(CALLEE, 1, place)
        yield
        rpc.shutdown()

    @asynccontextmanager
    async def caller(self, place: Path) -> AsyncIterator[TorchCaller]:
        self._init("caller", 0, place)
        yield TorchCaller()
        rpc.shutdown()

    def _init(self, name: str, rank: int, place: Path) -> None:
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{place}/rendezvous", **self._settings)
        with warnings.catch_warnings():
            # torch's own start-up uses what torch itself deprecates.
            warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
            init_rpc = cast("Callable[..., None]", rpc.init_rpc)  # torch has no type for it
            init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def system(
    threads: int | None = None, transports: list[str] | None = None, channels: list[str] | None = None
) -> TorchRpc:
    """Torch with these settings."""
    return TorchRpc(threads, transports, channels)
