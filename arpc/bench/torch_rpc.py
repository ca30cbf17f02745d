"""torch.distributed.rpc, used as well as its blocking API allows: a sliding window of futures, never a barrier."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
import warnings
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from torch.distributed import rpc

from arpc.bench import memory, payloads, torch_shapes
from arpc.bench.asyncio_caller import (
    bulk_figures,
    latency_figures,
    left_in_memory,
    start_memory_watch,
    stop_for_a_while,
)
from arpc.bench.blocking_caller import (
    MINIMUM_WARM_UP_S,
    in_threads,
    one_by_one,
    window,
)
from arpc.bench.crowd import crowd
from arpc.bench.functions import FUNCTIONS, big, new_tensor, noop
from arpc.bench.shapes import BY_NAME
from arpc.bench.systems import BULK_MINIMUM_CALLS, CALLEE, WARM_UP_SHARE, Measurement, callee_name
from arpc.bench.torch_gradients import TorchGradients

__all__ = ["TorchRpc", "system"]


FEWER_THREADS: Final = 16
"""Where torch has no future, threads block: as many as calls in flight, or this many if they are faster."""


class TorchCaller(TorchGradients):
    """The measurements with torch's calls."""

    async def shape(self, *, name: str, flavour: str, budget_s: float) -> Measurement:
        call = torch_shapes.call_of(BY_NAME[name])
        one_by_one(call, max(MINIMUM_WARM_UP_S, budget_s * WARM_UP_SHARE))
        return latency_figures(one_by_one(call, budget_s))

    async def shape_rate(self, *, name: str, flavour: str, in_flight: int, budget_s: float) -> Measurement:
        warm_up_s = max(MINIMUM_WARM_UP_S, budget_s * WARM_UP_SHARE)
        start = torch_shapes.started_call_of(BY_NAME[name])
        if start is not None:
            window(start, in_flight, warm_up_s)
            return {"calls_per_s": window(start, in_flight, budget_s)}
        call = torch_shapes.call_of(BY_NAME[name])
        in_threads(call, FEWER_THREADS, warm_up_s)
        return {"calls_per_s": max(in_threads(call, threads, budget_s) for threads in (FEWER_THREADS, in_flight))}

    async def in_turn(self, *, peers: int, in_flight: int, budget_s: float) -> Measurement:
        callees = [callee_name(peer) for peer in range(peers)]
        for callee in callees:
            rpc.rpc_sync(callee, noop)
        turns = itertools.cycle(callees)
        latency = latency_figures(one_by_one(lambda: rpc.rpc_sync(next(turns), noop), budget_s))
        begun, cpu_before = time.perf_counter(), time.process_time()
        calls_per_s = window(lambda: rpc.rpc_async(next(turns), noop), in_flight, budget_s)
        cpu_share = (time.process_time() - cpu_before) / (time.perf_counter() - begun)
        return latency | {"calls_per_s": calls_per_s, "caller_cpu_us": cpu_share / calls_per_s * 1e6}

    async def slow_reader(
        self, *, replies: int, size_bytes: int, stopped_s: float, callee_pid: int, budget_s: float
    ) -> Measurement:
        rpc.rpc_sync(CALLEE, new_tensor, (size_bytes,))
        _, callee_before = start_memory_watch(callee_pid)
        started = time.perf_counter()
        pending = [rpc.rpc_async(CALLEE, new_tensor, (size_bytes,)) for _ in range(replies)]
        stop_for_a_while(stopped_s)  # at once: torch's threads have read replies all along
        for one in pending:
            one.wait()
        return {
            "callee_growth_mb": (memory.peak_bytes(callee_pid) - callee_before) / 1e6,
            "total_s": time.perf_counter() - started,
        }

    async def rref_latency(self, *, budget_s: float) -> Measurement:
        def call() -> object:
            return rpc.remote(CALLEE, FUNCTIONS["def"]["noop"]).to_here()

        one_by_one(call, max(MINIMUM_WARM_UP_S, budget_s * WARM_UP_SHARE))
        return latency_figures(one_by_one(call, budget_s))

    async def rref_fetch(self, *, size_bytes: int, budget_s: float) -> Measurement:
        rref = rpc.remote(CALLEE, big, (size_bytes,))
        rref.to_here()
        return bulk_figures(one_by_one(rref.to_here, budget_s, minimum=BULK_MINIMUM_CALLS), size_bytes)

    async def latency_under_load(self, *, flavour: str, size_bytes: int, budget_s: float) -> Measurement:
        call = partial(rpc.rpc_sync, CALLEE, FUNCTIONS["def"]["noop"])
        start = partial(rpc.rpc_async, CALLEE, FUNCTIONS["def"]["drop"], (payloads.bulk_tensor(size_bytes),))
        idle = latency_figures(one_by_one(call, budget_s))
        transfer = start()

        def call_during_transfer() -> None:
            nonlocal transfer
            if transfer.done():
                transfer = start()
            call()

        loaded = latency_figures(one_by_one(call_during_transfer, 2 * budget_s))
        transfer.wait()
        return loaded | {"times_idle": loaded["p50_us"] / idle["p50_us"]}

    async def flood(self, *, calls: int, callee_pid: int, budget_s: float) -> Measurement:
        start = partial(rpc.rpc_async, CALLEE, FUNCTIONS["def"]["noop"])
        window(start, 16, budget_s)
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
        window(start, in_flight, max(1.0, budget_s))
        before = start_memory_watch(callee_pid)
        started = time.perf_counter()
        under_way: deque[Any] = deque()
        for _ in range(calls):
            if len(under_way) >= in_flight:
                under_way.popleft().wait()
            under_way.append(start())
        while under_way:
            under_way.popleft().wait()
        elapsed_s = time.perf_counter() - started
        return {"calls_per_s": calls / elapsed_s} | left_in_memory(callee_pid, before)


class TorchRpc:
    """Torch workers that meet through a file store; all other settings are torch's defaults."""

    def __init__(self, peers: int, settings: dict[str, Any]) -> None:
        self._peers = peers
        self._settings = settings

    def run(self, main: Coroutine[object, object, None]) -> None:
        asyncio.run(main)

    @contextmanager
    def others(self, place: Path) -> Iterator[None]:
        others = [(self._settings, self._peers, peer, place) for peer in range(1, self._peers)]
        with crowd(_run_member, others) as self._dismiss:
            yield

    @asynccontextmanager
    async def callee(self, place: Path) -> AsyncIterator[None]:
        start_worker(CALLEE, 1, place, self._peers, self._settings)
        yield
        self._dismiss()  # a graceful shutdown waits for them
        rpc.shutdown()

    @asynccontextmanager
    async def caller(self, place: Path) -> AsyncIterator[TorchCaller]:
        start_worker("caller", 0, place, self._peers, self._settings)
        yield TorchCaller(rpc)
        rpc.shutdown()


def start_worker(name: str, rank: int, place: Path, peers: int, settings: dict[str, Any]) -> None:
    """Start one worker of the group."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{place}/rendezvous", **settings)
    with warnings.catch_warnings():
        # torch's own start-up uses an API that torch itself deprecates.
        warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
        init_rpc = cast("Callable[..., None]", rpc.init_rpc)  # torch has no type for it
        init_rpc(name, rank=rank, world_size=1 + peers, rpc_backend_options=options)


def _run_member(stay: Callable[[], None], settings: dict[str, Any], peers: int, peer: int, place: Path) -> None:
    start_worker(callee_name(peer), 1 + peer, place, peers, settings)
    stay()
    rpc.shutdown()


def system(
    threads: int | None = None,
    transports: list[str] | None = None,
    channels: list[str] | None = None,
    peers: int = 1,
) -> TorchRpc:
    """Make torch with these settings."""
    settings: dict[str, Any] = {}
    if threads is not None:
        settings["num_worker_threads"] = threads
    if transports is not None:
        settings |= {"_transports": transports, "_channels": channels}
    return TorchRpc(peers, settings)
