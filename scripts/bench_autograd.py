"""Distributed autograd: arpc against torch.distributed.autograd, and what arpc adds to torch's own engine.

``python scripts/bench_autograd.py [--rounds 7] [--budget 0.5] [--only chain]`` starts a group of processes for each
system, measures them in turns, and prints the median of each round's ratio. ``same``: all processes of arpc on one CPU;
``split``: the caller on one, the others on another. Torch, with two threads a worker, is left to run where it likes,
which suits it best; it is stopped while arpc is measured. At the end: how much of a local run is not torch's engine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self, cast

import torch
from torch import Tensor

import arpc
from arpc.autograd.engine import RegionEngine, Source

ROOT: Final = Path(__file__).resolve().parents[1]
WARM_UP: Final = 20
SIZE: Final = 16

# What is measured, and over how many workers
SCENARIOS: Final = {
    "one op": 2,
    "one op, def": 2,
    "8 contexts": 2,
    "100 nodes": 2,
    "1000 nodes": 2,
    "10000 nodes": 2,
    "chain of 3": 3,
    "fan-out to 8": 9,
}


# -- what is called


async def mul_async(x: Tensor, y: Tensor) -> Tensor:
    """One operation."""
    return x * y


def mul(x: Tensor, y: Tensor) -> Tensor:
    """The same, for threads."""
    return x * y


async def deepen_async(x: Tensor, nodes: int) -> Tensor:
    """A chain of nodes."""
    return deepen(x, nodes)


def deepen(x: Tensor, nodes: int) -> Tensor:
    """The same, for threads."""
    for _ in range(nodes):
        x = x + 1
    return x


async def pass_on_async(x: Tensor, *further: str) -> Tensor:
    """A row of workers, each of which calls the next."""
    return 2 * await arpc.rpc_sync(further[0], pass_on_async, (x, *further[1:])) if further else 2 * x


def pass_on(x: Tensor, *further: str) -> Tensor:
    """The same with torch."""
    from torch.distributed import rpc  # slow, and of the opponent alone

    return 2 * rpc.rpc_sync(further[0], pass_on, (x, *further[1:])) if further else 2 * x


# -- one process


class ArpcSteps:
    """One step of each scenario, with arpc."""

    def __init__(self) -> None:
        self.x = torch.ones(SIZE, requires_grad=True)
        self.y = torch.ones(SIZE, requires_grad=True)

    async def one_op(self, function: Callable[..., Any] = mul_async) -> None:
        async with arpc.autograd.context() as ctx_id:
            product = await arpc.rpc_sync("worker1", function, (self.x, self.y))
            await arpc.autograd.backward(ctx_id, [product.sum()])
            assert len(arpc.autograd.get_gradients(ctx_id)) == 2

    async def one_op_def(self) -> None:
        await self.one_op(mul)

    async def contexts(self) -> None:
        await asyncio.gather(*(self.one_op() for _ in range(8)))

    async def nodes(self, count: int) -> None:
        async with arpc.autograd.context() as ctx_id:
            x = deepen(self.x, count // 4)
            x = await arpc.rpc_sync("worker1", deepen_async, (x, count // 2))
            await arpc.autograd.backward(ctx_id, [deepen(x, count // 4).sum()])
            assert len(arpc.autograd.get_gradients(ctx_id)) == 1

    async def chain(self) -> None:
        async with arpc.autograd.context() as ctx_id:
            y = await arpc.rpc_sync("worker1", pass_on_async, (self.x, "worker2"))
            await arpc.autograd.backward(ctx_id, [y.sum()])

    async def fan_out(self) -> None:
        async with arpc.autograd.context() as ctx_id:
            calls = [arpc.rpc_async(f"worker{rank}", mul_async, (self.x, self.y)) for rank in range(1, 9)]
            products = [await call for call in calls]
            await arpc.autograd.backward(ctx_id, [cast("Tensor", sum(products)).sum()])
            assert len(arpc.autograd.get_gradients(ctx_id)) == 2


class TorchSteps:
    """The same with torch. Its steps block, so contexts at the same time take threads."""

    def __init__(self) -> None:
        from concurrent.futures import ThreadPoolExecutor

        from torch.distributed import autograd, rpc

        self.rpc: Any = rpc
        self.autograd: Any = autograd
        self.threads = ThreadPoolExecutor(8)
        self.x = torch.ones(SIZE, requires_grad=True)
        self.y = torch.ones(SIZE, requires_grad=True)

    def _one_op(self) -> None:
        with self.autograd.context() as ctx_id:
            product = self.rpc.rpc_sync("worker1", mul, (self.x, self.y))
            self.autograd.backward(ctx_id, [product.sum()])
            assert len(self.autograd.get_gradients(ctx_id)) == 2

    async def one_op(self) -> None:
        self._one_op()

    one_op_def = one_op

    async def contexts(self) -> None:
        for done in [self.threads.submit(self._one_op) for _ in range(8)]:
            done.result()

    async def nodes(self, count: int) -> None:
        with self.autograd.context() as ctx_id:
            x = deepen(self.x, count // 4)
            x = self.rpc.rpc_sync("worker1", deepen, (x, count // 2))
            self.autograd.backward(ctx_id, [deepen(x, count // 4).sum()])
            assert len(self.autograd.get_gradients(ctx_id)) == 1

    async def chain(self) -> None:
        with self.autograd.context() as ctx_id:
            y = self.rpc.rpc_sync("worker1", pass_on, (self.x, "worker2"))
            self.autograd.backward(ctx_id, [y.sum()])

    async def fan_out(self) -> None:
        with self.autograd.context() as ctx_id:
            calls = [self.rpc.rpc_async(f"worker{rank}", mul, (self.x, self.y)) for rank in range(1, 9)]
            products = [call.wait() for call in calls]
            self.autograd.backward(ctx_id, [cast("Tensor", sum(products)).sum()])
            assert len(self.autograd.get_gradients(ctx_id)) == 2


def step_of(steps: Any, scenario: str) -> Callable[[], Awaitable[None]]:
    """The coroutine function that makes one step of a scenario."""
    if scenario.endswith("nodes"):
        return lambda: steps.nodes(int(scenario.split(maxsplit=1)[0]))
    names = {
        "one op": "one_op",
        "one op, def": "one_op_def",
        "8 contexts": "contexts",
        "chain of 3": "chain",
        "fan-out to 8": "fan_out",
    }
    return cast("Callable[[], Awaitable[None]]", getattr(steps, names[scenario]))


async def measure(steps: Any, scenario: str, budget_s: float) -> float:
    """The median of a step, in microseconds."""
    step = step_of(steps, scenario)
    end = time.perf_counter() + budget_s / 5
    for _ in range(WARM_UP):
        await step()
        if time.perf_counter() > end:
            break
    samples: list[float] = []
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end or not samples:
        begun = time.perf_counter()
        await step()
        samples.append(time.perf_counter() - begun)
    return statistics.median(samples) * 1e6


async def obey(steps: Any) -> None:
    """Measure what is asked for, line by line."""
    loop = asyncio.get_running_loop()
    print(json.dumps("ready"), flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        scenario, budget_s = json.loads(line)
        print(json.dumps(await measure(steps, scenario, budget_s)), flush=True)


async def run_arpc(rank: int, size: int, place: str) -> None:
    """One worker of arpc."""
    async with arpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, init_method=f"file://{place}/group"):
        await obey(ArpcSteps() if rank == 0 else None)


def run_torch(rank: int, size: int, place: str) -> None:
    """One worker of torch."""
    warnings.filterwarnings("ignore", message="You are using a Backend")
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=2, init_method=f"file://{place}/group")
    cast("Any", rpc).init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    asyncio.run(obey(TorchSteps() if rank == 0 else None))
    cast("Any", rpc).shutdown()


# -- the process that compares


class Group:
    """The processes of one system."""

    def __init__(self, system: str, size: int) -> None:
        self._place = tempfile.TemporaryDirectory(prefix=f"bench-{system}-")
        command = [sys.executable, __file__, "--worker", system]
        self._processes = [
            subprocess.Popen(
                [*command, str(rank), str(size), self._place.name],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        for process in self._processes:
            self._hear(process)

    def __enter__(self) -> Self:
        return self

    def _hear(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("a worker has ended: see above")
        return json.loads(line)

    def pin(self, caller: int, others: int) -> None:
        for process, cpu in zip(self._processes, [caller, *[others] * len(self._processes)], strict=False):
            for thread in Path(f"/proc/{process.pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {cpu})

    def signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)

    def measure(self, scenario: str, budget_s: float) -> float:
        first = self._processes[0]
        assert first.stdin is not None
        first.stdin.write(json.dumps([scenario, budget_s]) + "\n")
        first.stdin.flush()
        return float(self._hear(first))

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGCONT)
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._place.cleanup()


def compare(scenarios: list[str], size: int, rounds: int, budget_s: float, placements: list[str]) -> None:
    """Measure scenarios that take the same number of workers, and print a line for each."""
    cpus = sorted(os.sched_getaffinity(0))
    figures: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        ours, theirs = stack.enter_context(Group("arpc", size)), stack.enter_context(Group("torch", size))
        theirs.signal(signal.SIGSTOP)
        for _ in range(rounds):
            for scenario in scenarios:
                for placement in placements:
                    ours.pin(cpus[0], cpus[0] if placement == "same" else cpus[-1])
                    figures.setdefault((scenario, placement), []).append(ours.measure(scenario, budget_s))
                theirs.signal(signal.SIGCONT)
                figures.setdefault((scenario, "torch"), []).append(theirs.measure(scenario, budget_s))
                theirs.signal(signal.SIGSTOP)
    for scenario in scenarios:
        torchs = figures[scenario, "torch"]
        line = f"{scenario:14} torch {statistics.median(torchs):9.0f} us"
        for placement in placements:
            mine = figures[scenario, placement]
            ratio = statistics.median(other / own for own, other in zip(mine, torchs, strict=True))
            line += f" | {placement} {statistics.median(mine):8.0f} us {ratio:5.2f}x"
        print(line, flush=True)


def engine_share(nodes: int) -> float:
    """The part of a local run that is not torch's own engine: the look at the graph, that is."""
    looking = running = float("inf")
    for _ in range(15):
        root = deepen(torch.ones(SIZE, requires_grad=True), nodes).sum()
        begun = time.perf_counter()
        engine = RegionEngine([Source([(root.grad_fn, 0)], None)], retain_graph=True)
        engine.walk(10 * nodes)
        engine.resolve(0, [torch.ones(())])
        walked = time.perf_counter()
        engine.run()
        looking = min(looking, walked - begun)
        running = min(running, time.perf_counter() - walked)
    return looking / (looking + running)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=0.5, help="seconds for each figure")
    parser.add_argument("--only", default="", help="scenarios with this in their name")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        system, rank, size, place = arguments.worker
        torch.set_num_threads(1)
        if system == "arpc":
            arpc.run(run_arpc(int(rank), int(size), place))
        else:
            run_torch(int(rank), int(size), place)
        return
    placements = ["same", "split"] if len(os.sched_getaffinity(0)) > 1 else ["same"]
    for size in sorted(set(SCENARIOS.values())):
        scenarios = [name for name, needed in SCENARIOS.items() if needed == size and arguments.only in name]
        if scenarios:
            compare(scenarios, size, arguments.rounds, arguments.budget, placements)
    torch.set_num_threads(1)
    gc.freeze()  # as `init_rpc` does
    for nodes in (100, 1000, 10_000):
        print(f"{nodes:6} nodes: {engine_share(nodes):.0%} of a local run is outside of torch's engine")


if __name__ == "__main__":
    main()
