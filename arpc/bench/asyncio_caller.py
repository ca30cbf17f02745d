"""Measures calls that are awaited. A system provides the calls; the loops around them are the same for all systems."""

from __future__ import annotations

import abc
import asyncio
import gc
import itertools
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable
from typing import Final

from arpc.bench import memory, payloads
from arpc.bench.systems import BULK_MINIMUM_CALLS, WARM_UP_SHARE, Measurement, bulk_warm_up_calls

__all__ = [
    "GIB",
    "REQUESTS_LEAVE_S",
    "AsyncioCaller",
    "Call",
    "bulk_figures",
    "latency_figures",
    "left_in_memory",
    "start_memory_watch",
    "stop_for_a_while",
]

GIB: Final = 1 << 30
REQUESTS_LEAVE_S: Final = 0.01
"""Seconds that a slow reader runs before it stops, so that its requests are sent."""

Call = Callable[[], Awaitable[object]]
"""A function that makes one call; awaiting its return value gives the result."""


class AsyncioCaller(abc.ABC):
    """The measurements of `Caller` and further ones, for a system whose calls are awaited."""

    @abc.abstractmethod
    def prepare(self, function: str, flavour: str, payload: str) -> Call:
        """Return a call of `function` that is awaited at once, as cheap as a user of this system could make it."""

    @abc.abstractmethod
    def prepare_started(self, function: str, flavour: str, payload: str) -> Call:
        """Return a call that is in flight as soon as it is made, and awaited later."""

    @abc.abstractmethod
    def prepare_bulk(self, function: str, size_bytes: int) -> Call:
        """Return a call with one array of `size_bytes` as its argument."""

    def prepare_to(self, peer: int) -> Call:
        """Return an empty call to one of several callees."""
        raise NotImplementedError(f"{type(self).__name__} has one callee only")

    def prepare_reply(self, size_bytes: int, flavour: str = "async") -> Call:
        """Return a call whose reply is a new array of `size_bytes`."""
        raise NotImplementedError(f"{type(self).__name__} is not asked for large replies")

    async def latency(self, *, function: str, flavour: str, payload: str, budget_s: float) -> Measurement:
        call = self.prepare(function, flavour, payload)
        if function == "echo" and not payloads.same_content(payloads.array_arguments(payload)[0], await call()):
            raise RuntimeError(f"the echo of {payload} differs from what was sent")
        await self._one_by_one(call, budget_s * WARM_UP_SHARE)
        return latency_figures(await self._one_by_one(call, budget_s))

    async def throughput(
        self, *, function: str, flavour: str, payload: str, in_flight: int, budget_s: float
    ) -> Measurement:
        call = self.prepare(function, flavour, payload)
        await self._window(call, in_flight, budget_s * WARM_UP_SHARE)
        return {"calls_per_s": await self._window(call, in_flight, budget_s)}

    async def bulk(self, *, function: str, size_bytes: int, budget_s: float) -> Measurement:
        """Measure one large transfer after another: ``gib_per_s`` of the median. With ``keep`` the receiver is cold."""
        call = self.prepare_bulk(function, size_bytes)
        for _ in range(bulk_warm_up_calls(size_bytes)):
            await call()
        samples: list[float] = []
        started = time.perf_counter()
        while len(samples) < BULK_MINIMUM_CALLS or time.perf_counter() - started < budget_s:
            begin = time.perf_counter()
            await call()  # the result, if it is one, is freed before the next call
            samples.append(time.perf_counter() - begin)
        await self.prepare("forget", "async", "none")()
        return bulk_figures(samples, size_bytes)

    async def latency_under_load(self, *, flavour: str, size_bytes: int, budget_s: float) -> Measurement:
        """Measure `latency` of an empty call, idle and then while transfers of `size_bytes` run one after another."""
        call = self.prepare("noop", flavour, "none")
        transfer = self.prepare_bulk("drop", size_bytes)
        idle = latency_figures(await self._one_by_one(call, budget_s))

        async def keep_transferring() -> None:
            while True:
                await transfer()

        load = asyncio.create_task(keep_transferring())
        try:
            await self._one_by_one(call, budget_s * WARM_UP_SHARE)
            loaded = latency_figures(await self._one_by_one(call, 2 * budget_s))
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
        return loaded | {"times_idle": loaded["p50_us"] / idle["p50_us"]}

    async def latency_among_results(self, *, flavour: str, size_bytes: int, calls: int, budget_s: float) -> Measurement:
        """Measure `latency` of an empty call while `calls` calls are in flight that return `size_bytes` each.

        ``unanswered_percent`` is the share of the large calls without a reply when the first small one had its reply.
        """
        call = self.prepare("noop", flavour, "none")
        transfer = self.prepare_reply(size_bytes, flavour)
        await self._one_by_one(call, budget_s * WARM_UP_SHARE)
        samples: list[float] = []
        unanswered = 0
        deadline = time.perf_counter() + budget_s
        while not samples or time.perf_counter() < deadline:
            large = {asyncio.ensure_future(transfer()) for _ in range(calls)}
            for each in large:
                each.add_done_callback(large.discard)
            await asyncio.sleep(0)
            is_first = not samples
            while large:
                begun = time.perf_counter()
                await call()
                samples.append(time.perf_counter() - begun)
                if is_first:
                    is_first = False
                    unanswered = len(large)
        return latency_figures(samples) | {"unanswered_percent": 100 * unanswered / calls}

    async def flood(self, *, calls: int, callee_pid: int, budget_s: float) -> Measurement:
        """Start `calls` calls in one go, so that all are in flight at once, then wait for them.

        The process should be fresh: memory that the allocator has kept from an earlier flood would not be counted.
        """
        call = self.prepare_started("noop", "async", "none")
        await self._window(call, 16, budget_s)
        caller_before, callee_before = start_memory_watch(callee_pid)
        started = time.perf_counter()
        pending = [call() for _ in range(calls)]
        issued = time.perf_counter()
        # The list above is one long step of this measurement itself; only later delays count as stalls of the system.
        watch = memory.StallWatch()
        for one in pending:
            await one
        finished = time.perf_counter()
        return {
            "calls_per_s": calls / (finished - started),
            "total_s": finished - started,
            "issue_s": issued - started,
            "stall_ms": watch.stop() * 1e3,
            "caller_bytes_per_call": (memory.peak_bytes(os.getpid()) - caller_before) / calls,
            "callee_growth_mb": (memory.peak_bytes(callee_pid) - callee_before) / 1e6,
        }

    async def soak(self, *, calls: int, in_flight: int, callee_pid: int, budget_s: float) -> Measurement:
        """Make many calls through a window: the growth of resident memory that they leave, on both sides."""
        call = self.prepare("noop", "async", "none")
        await self._window(call, in_flight, max(1.0, budget_s))
        before = start_memory_watch(callee_pid)

        async def some_calls() -> None:
            for _ in range(calls // in_flight):
                await call()

        started = time.perf_counter()
        await asyncio.gather(*(some_calls() for _ in range(in_flight)))
        elapsed_s = time.perf_counter() - started
        return {"calls_per_s": calls / elapsed_s} | left_in_memory(callee_pid, before)

    async def slow_reader(
        self, *, replies: int, size_bytes: int, stopped_s: float, callee_pid: int, budget_s: float
    ) -> Measurement:
        """Request many large replies, and stop this process before it reads them: the growth of the callee's memory."""
        call = self.prepare_reply(size_bytes)
        await call()
        _, callee_before = start_memory_watch(callee_pid)
        started = time.perf_counter()
        pending = [asyncio.ensure_future(call()) for _ in range(replies)]
        await asyncio.sleep(REQUESTS_LEAVE_S)
        stop_for_a_while(stopped_s)
        for one in pending:
            await one
        return {
            "callee_growth_mb": (memory.peak_bytes(callee_pid) - callee_before) / 1e6,
            "total_s": time.perf_counter() - started,
        }

    async def in_turn(self, *, peers: int, in_flight: int, budget_s: float) -> Measurement:
        """Measure an empty call to each of `peers` callees in turn: one after another, and a window of them.

        ``caller_cpu_us``: the CPU time of the caller for each call of the window, busy-polling included.
        """
        calls = [self.prepare_to(peer) for peer in range(peers)]
        for call in calls:
            await call()
        turns = itertools.cycle(calls)

        def call_next() -> Awaitable[object]:
            return next(turns)()

        await self._one_by_one(call_next, budget_s * WARM_UP_SHARE)
        latency = latency_figures(await self._one_by_one(call_next, budget_s))
        await self._window(call_next, in_flight, budget_s * WARM_UP_SHARE)
        begun, cpu_before = time.perf_counter(), time.process_time()
        calls_per_s = await self._window(call_next, in_flight, budget_s)
        cpu_share = (time.process_time() - cpu_before) / (time.perf_counter() - begun)
        return latency | {"calls_per_s": calls_per_s, "caller_cpu_us": cpu_share / calls_per_s * 1e6}

    async def _one_by_one(self, call: Call, duration_s: float) -> list[float]:
        clock = time.perf_counter
        samples: list[float] = []
        now = clock()
        end = now + duration_s
        while now < end:
            begin = clock()
            await call()
            now = clock()
            samples.append(now - begin)
        return samples

    async def _window(self, call: Call, in_flight: int, duration_s: float) -> float:
        """Return the calls per second of `in_flight` coroutines that each call again as soon as a reply comes."""
        running = True
        done = 0

        async def caller() -> None:
            nonlocal done
            await call()  # on a busy machine, the time may be up before the first step
            done += 1
            while running:
                await call()
                done += 1

        def stop() -> None:
            nonlocal running
            running = False

        started = time.perf_counter()
        asyncio.get_running_loop().call_later(duration_s, stop)
        await asyncio.gather(*(caller() for _ in range(in_flight)))
        return done / (time.perf_counter() - started)


def latency_figures(samples_s: list[float]) -> Measurement:
    """Summarize samples of one call after another."""
    ordered = sorted(samples_s)
    return {
        "p50_us": statistics.median(ordered) * 1e6,
        "p99_us": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1e6,
        "calls": float(len(ordered)),
    }


def bulk_figures(samples_s: list[float], size_bytes: int) -> Measurement:
    """Summarize samples of one transfer after another. An echo's payload counts once, though it is sent twice."""
    median_s = statistics.median(samples_s)
    return {"gib_per_s": size_bytes / median_s / GIB, "p50_us": median_s * 1e6, "calls": float(len(samples_s))}


def start_memory_watch(callee_pid: int) -> tuple[int, int]:
    """Return the resident bytes of caller and callee, and reset their peaks."""
    gc.collect()
    for pid in (os.getpid(), callee_pid):
        memory.forget_peak(pid)
    return memory.resident_bytes(os.getpid()), memory.resident_bytes(callee_pid)


def left_in_memory(callee_pid: int, before: tuple[int, int]) -> Measurement:
    """Return how much more resident memory caller and callee have now than `start_memory_watch` returned."""
    gc.collect()
    return {
        f"{role}_growth_mb": (memory.resident_bytes(pid) - resident_bytes) / 1e6
        for role, pid, resident_bytes in zip(("caller", "callee"), (os.getpid(), callee_pid), before, strict=True)
    }


def stop_for_a_while(duration_s: float) -> None:
    """Stop this whole process, with its threads, as if it were swapped out or held in a debugger."""
    awakener = subprocess.Popen(["/bin/sh", "-c", f"sleep {duration_s}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    awakener.wait()
