"""arpc with its defaults, and through its public API except where a measurement has to look inside."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import arpc
from arpc.bench import arpc_shapes, memory, payloads
from arpc.bench.arpc_gradients import ArpcGradients
from arpc.bench.asyncio_caller import Call, bulk_figures, latency_figures, left_in_memory, start_memory_watch
from arpc.bench.crowd import crowd
from arpc.bench.functions import FUNCTIONS, Flavour, big, chained_async, nap, new_tensor, new_tensor_async
from arpc.bench.overload import Attempt, open_loop
from arpc.bench.shapes import BY_NAME
from arpc.bench.systems import BULK_MINIMUM_CALLS, CALLEE, WARM_UP_SHARE, Measurement, callee_name
from arpc.runtime import current

__all__ = ["Arpc", "system"]

# A result is freed after the next one is requested: two blocks of memory alternate, and both ends touch each
FETCHES_UNTIL_WARM = 5
PROFILING_TURNS = 40
SHAPE_WARM_UP_S = 0.05


class ArpcCaller(ArpcGradients):
    """The measurements, with arpc's calls."""

    def prepare(self, function: str, flavour: str, payload: str) -> Call:
        called = FUNCTIONS[cast("Flavour", flavour)][function]
        return partial(arpc.rpc_sync, CALLEE, called, payloads.tensor_arguments(payload))

    def prepare_started(self, function: str, flavour: str, payload: str) -> Call:
        called = FUNCTIONS[cast("Flavour", flavour)][function]
        return partial(arpc.rpc_async, CALLEE, called, payloads.tensor_arguments(payload))

    def prepare_bulk(self, function: str, size_bytes: int) -> Call:
        return partial(arpc.rpc_sync, CALLEE, FUNCTIONS["async"][function], (payloads.bulk_tensor(size_bytes),))

    def prepare_to(self, peer: int) -> Call:
        return partial(arpc.rpc_sync, callee_name(peer), FUNCTIONS["async"]["noop"])

    def prepare_reply(self, size_bytes: int, flavour: str = "async") -> Call:
        made = new_tensor if flavour == "def" else new_tensor_async
        return partial(arpc.rpc_async, CALLEE, made, (size_bytes,))

    async def shape(self, *, name: str, flavour: str, budget_s: float) -> Measurement:
        """Measure one call of a shape after another: ``p50_us``."""
        call = arpc_shapes.call_of(BY_NAME[name], cast("Flavour", flavour))
        await self._one_by_one(call, max(SHAPE_WARM_UP_S, budget_s * WARM_UP_SHARE))
        return latency_figures(await self._one_by_one(call, budget_s))

    async def shape_rate(self, *, name: str, flavour: str, in_flight: int, budget_s: float) -> Measurement:
        """Measure a sliding window of calls of a shape: ``calls_per_s``."""
        call = arpc_shapes.call_of(BY_NAME[name], cast("Flavour", flavour))
        await self._window(call, in_flight, max(SHAPE_WARM_UP_S, budget_s * WARM_UP_SHARE))
        return {"calls_per_s": await self._window(call, in_flight, budget_s)}

    async def growth(self, *, few: str, many: str, more: int, budget_s: float) -> Measurement:
        """Measure two shapes, of which one has ``more`` of something: ``each_us`` is what each of these adds."""
        medians = [(await self.shape(name=name, flavour="async", budget_s=budget_s))["p50_us"] for name in (few, many)]
        return {"each_us": (medians[1] - medians[0]) / more}

    async def overload(self, *, times: int, in_flight: int, callee_pid: int, budget_s: float) -> Measurement:
        """Measure calls that take a while: the peak rate, then `times` that rate, whether or not replies come."""

        async def call() -> None:
            await arpc.rpc_sync(CALLEE, nap)

        async def attempt() -> Attempt:
            begin = time.perf_counter()
            try:
                await arpc.rpc_sync(CALLEE, nap, timeout=1.0)
            except arpc.OverloadedError:
                return Attempt("refused", 0.0)
            except arpc.RpcTimeoutError:
                return Attempt("late", 0.0)
            return Attempt("ok", time.perf_counter() - begin)

        await self._window(call, in_flight, 0.5)
        peak_per_s = await self._window(call, in_flight, max(2.0, budget_s))
        caller_before, callee_before = start_memory_watch(callee_pid)
        figures = await open_loop(attempt, times * peak_per_s, max(4.0, budget_s))
        return figures | {
            "peak_per_s": peak_per_s,
            "of_peak_percent": 100 * figures["goodput_per_s"] / peak_per_s,
            "caller_growth_mb": (memory.peak_bytes(os.getpid()) - caller_before) / 1e6,
            "callee_growth_mb": (memory.peak_bytes(callee_pid) - callee_before) / 1e6,
        }

    async def rref_latency(self, *, budget_s: float) -> Measurement:
        """Measure `remote`, then `to_here`, one pair after another: ``p50_us``."""

        async def call() -> object:
            return await arpc.remote(CALLEE, FUNCTIONS["async"]["noop"])

        await self._one_by_one(call, budget_s * WARM_UP_SHARE)
        return latency_figures(await self._one_by_one(call, budget_s))

    async def rref_chain(self, *, length: int, budget_s: float) -> Measurement:
        """Measure a chain of `length` calls, each of a method of the previous result, in multiples of other calls.

        ``round_trips``: of one small call. ``of_calls``: of `length` + 1 small calls that are made at once.
        """

        async def call() -> object:
            rref = arpc.remote(CALLEE, chained_async)
            for _ in range(length - 1):
                rref = rref.remote().next()
            return await rref._get_type()  # noqa: SLF001 - waits for the last and fetches next to nothing

        single = self.prepare("noop", "async", "none")
        await self._one_by_one(call, budget_s * WARM_UP_SHARE)
        chain = latency_figures(await self._one_by_one(call, budget_s))
        round_trip = latency_figures(await self._one_by_one(single, budget_s))
        started = self.prepare_started("noop", "async", "none")

        async def at_once() -> object:
            return [await future for future in [started() for _ in range(length + 1)]]

        together = latency_figures(await self._one_by_one(at_once, budget_s))
        return chain | {
            "round_trips": chain["p50_us"] / round_trip["p50_us"],
            "of_calls": chain["p50_us"] / together["p50_us"],
        }

    async def rref_fetch(self, *, size_bytes: int, budget_s: float) -> Measurement:
        """Measure a large tensor that is fetched through an RRef again and again."""
        rref = arpc.remote(CALLEE, big, (size_bytes,))
        samples: list[float] = []
        for _ in range(FETCHES_UNTIL_WARM):
            await rref
        started = time.perf_counter()
        while len(samples) < BULK_MINIMUM_CALLS or time.perf_counter() - started < budget_s:
            begin = time.perf_counter()
            await rref
            samples.append(time.perf_counter() - begin)
        return bulk_figures(samples, size_bytes)

    async def rref_churn(self, *, rrefs: int, callee_pid: int, budget_s: float) -> Measurement:
        """Make many RRefs, send each to its owner and back, and drop them all: the rate, and the growth of memory."""
        echo = FUNCTIONS["async"]["echo"]
        await self._churn(1000, echo)
        before = start_memory_watch(callee_pid)
        started = time.perf_counter()
        await self._churn(rrefs, echo)
        elapsed_s = time.perf_counter() - started
        return {"rrefs_per_s": rrefs / elapsed_s} | left_in_memory(callee_pid, before)

    async def profiling_off(self, *, budget_s: float) -> Measurement:
        """Measure small calls with and without the check for observers, alternately: ``share``.

        That is how much longer the first take than the second, as a fraction of the second.
        """
        agent = current().agent
        call = self.prepare("noop", "async", "none")
        as_it_is = agent.caller.sender
        without = agent.unobserved_sender
        await self._one_by_one(call, budget_s * WARM_UP_SHARE)
        ratios: list[float] = []
        try:
            for _ in range(PROFILING_TURNS):
                both: list[float] = []
                for sender in (as_it_is, without):
                    agent.caller.sender = sender
                    both.append(statistics.median(await self._one_by_one(call, budget_s / PROFILING_TURNS)))
                ratios.append(both[0] / both[1])
        finally:
            agent.caller.sender = as_it_is
        return {"share": max(0.0, statistics.median(ratios) - 1)}

    async def traced_latency(self, *, operators: int, budget_s: float) -> Measurement:
        """Measure one small call after another while both workers record a trace: ``p50_us``."""
        call = self.prepare("noop", "async", "none")
        async with arpc.profiler.profile(operators=bool(operators)):
            await self._one_by_one(call, budget_s * WARM_UP_SHARE)
            return latency_figures(await self._one_by_one(call, budget_s))

    async def _churn(self, count: int, echo: Callable[..., object]) -> None:
        made = [arpc.remote(CALLEE, FUNCTIONS["async"]["noop"]) for _ in range(count)]
        forked = [await arpc.rpc_sync(CALLEE, echo, (made[start : start + 1000],)) for start in range(0, count, 1000)]
        made.clear()
        forked.clear()
        while await arpc.rpc_sync(CALLEE, count_owned):  # noqa: ASYNC110 - it happens in another process
            await asyncio.sleep(0.01)


async def count_owned() -> int:
    """Return how many RRefs this worker owns."""
    return len(current().rref_context.forks.owned)


class Arpc:
    """Workers that meet through a file store: a caller, and one callee or more."""

    def __init__(self, listen: str, peers: int, max_calls_in_flight: int) -> None:
        self._listen = listen
        self._peers = peers
        self._max_calls_in_flight = max_calls_in_flight

    def run(self, main: Coroutine[object, object, None]) -> None:
        arpc.run(main)

    @contextmanager
    def others(self, place: Path) -> Iterator[None]:
        others = [(self._listen, self._peers, peer, place) for peer in range(1, self._peers)]
        with crowd(_run_member, others) as self._dismiss:
            yield

    @asynccontextmanager
    async def callee(self, place: Path) -> AsyncIterator[None]:
        async with self._worker(CALLEE, 1, place):
            yield
            self._dismiss()  # a graceful shutdown waits for them

    @asynccontextmanager
    async def caller(self, place: Path) -> AsyncIterator[ArpcCaller]:
        async with self._worker("caller", 0, place):
            yield ArpcCaller()

    def _worker(self, name: str, rank: int, place: Path) -> AbstractAsyncContextManager[object]:
        return start_worker(name, rank, place, self._listen, self._peers, self._max_calls_in_flight)


def start_worker(
    name: str, rank: int, place: Path, listen: str, peers: int, max_calls_in_flight: int = 0
) -> AbstractAsyncContextManager[object]:
    """Make a worker of the group with arpc's defaults, except for its address and its limit of calls in flight."""
    return arpc.init_rpc(
        name,
        rank=rank,
        world_size=1 + peers,
        init_method=f"file://{place}/rendezvous",
        options=arpc.RpcOptions(listen=(listen,), max_calls_in_flight=max_calls_in_flight),
    )


def _run_member(stay: Callable[[], None], listen: str, peers: int, peer: int, place: Path) -> None:
    async def serve() -> None:
        async with start_worker(callee_name(peer), 1 + peer, place, listen, peers):
            await asyncio.to_thread(stay)

    arpc.run(serve())


def system(listen: str, peers: int = 1, max_calls_in_flight: int = 0) -> Arpc:
    """Make arpc with workers that listen at the address `listen`."""
    return Arpc(listen, peers, max_calls_in_flight)
