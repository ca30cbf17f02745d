"""The cost of a training step as it grows: 1 to 1,000 calls in an autograd context, and 1 to 1,000 tensors in a call.

    python -m scripts.autograd_growth --plot docs/images

Two processes, forked from one that has imported torch, share one CPU. A step is the forward, the backward pass and the
end of the context. Calls are chained (each takes the result of the one before), or made side by side. The figure is the
CPU time of both processes together, which on one CPU is the time of a step, unless other processes use that CPU too.
The best of some steps is taken: other work on the machine can only add time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

import arpc
from arpc.launch.meeting import StoreServer
from arpc.launch.plan import MeetingPoint, as_group, environment_of

SIZES: Final = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)
SIZE: Final = 16
"""Elements of each tensor: few, as arithmetic is not to be measured."""
BUDGET_S: Final = 1.0
LEAST_STEPS: Final = 4
Step = Callable[[int], Awaitable[None]]


async def scale(x: Tensor, y: Tensor) -> Tensor:
    """Multiply: one operation on another worker."""
    return x * y


async def total(tensors: list[Tensor]) -> Tensor:
    """Take many tensors, and return one."""
    return torch.stack(tensors).sum()


async def chained(calls: int) -> None:
    """Run a step in which each call takes the result of the one before."""
    x, weight = torch.ones(SIZE, requires_grad=True), torch.ones(SIZE, requires_grad=True)
    async with arpc.autograd.context() as ctx_id:
        for _ in range(calls):
            x = await arpc.rpc_sync("1", scale, (x, weight))
        await arpc.autograd.backward(ctx_id, [x.sum()])
        assert len(arpc.autograd.get_gradients(ctx_id)) == 2


async def side_by_side(calls: int) -> None:
    """Run a step in which all calls are made at once."""
    x, weight = torch.ones(SIZE, requires_grad=True), torch.ones(SIZE, requires_grad=True)
    async with arpc.autograd.context() as ctx_id:
        results = await asyncio.gather(*(arpc.rpc_sync("1", scale, (x, weight)) for _ in range(calls)))
        await arpc.autograd.backward(ctx_id, [torch.stack(results).sum()])
        assert len(arpc.autograd.get_gradients(ctx_id)) == 2


async def tensors(count: int) -> None:
    """Run a step in which one call takes many tensors."""
    leaves = [torch.ones(SIZE, requires_grad=True) for _ in range(count)]
    async with arpc.autograd.context() as ctx_id:
        result = await arpc.rpc_sync("1", total, (leaves,))
        await arpc.autograd.backward(ctx_id, [result])
        assert len(arpc.autograd.get_gradients(ctx_id)) == count


STEPS: Final[dict[str, Step]] = {"chained": chained, "side by side": side_by_side, "tensors": tensors}


async def process_id() -> int:
    """Return the process id of a worker."""
    return os.getpid()


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process, all threads included (Linux)."""
    return time.clock_gettime((~pid << 3) | 2)


async def best_of(step: Step, size: int, pids: Sequence[int]) -> float:
    """Return the least CPU time of some steps, in seconds."""
    await step(size)
    best = float("inf")
    until = time.perf_counter() + BUDGET_S
    taken = 0
    while taken < LEAST_STEPS or time.perf_counter() < until:
        taken += 1
        begun = sum(map(cpu_s, pids))
        await step(size)
        best = min(best, sum(map(cpu_s, pids)) - begun)
    return best


async def take_part() -> dict[str, list[float]]:
    """Join the group; worker 0 measures, and returns microseconds by kind of step."""
    os.sched_setaffinity(0, {0})
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    async with arpc.init_rpc(os.environ["RANK"], options=arpc.RpcOptions(rpc_timeout=0)):
        if os.environ["RANK"] == "0":
            pids = os.getpid(), await arpc.rpc_sync("1", process_id)
            for name, step in STEPS.items():
                found[name] = [1e6 * await best_of(step, size, pids) for size in SIZES]
                each = (found[name][-1] - found[name][0]) / (SIZES[-1] - SIZES[0])
                print(name, [round(value) for value in found[name]], f"us; {each:.0f} us for each more", flush=True)
    return found


def run_worker(environment: dict[str, str], pipe: Connection) -> None:
    """Run one worker: the target of each process."""
    os.environ.update(environment)
    pipe.send(arpc.run(take_part))


async def measure() -> dict[str, list[float]]:
    """Run the pair; return microseconds by kind of step, for each of `SIZES`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["arpc._public", "uvloop"])
    server = StoreServer()
    await server.serve()
    meeting = MeetingPoint(server.host, server.port)
    workers = []
    try:
        for slot in as_group(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=run_worker, args=(environment_of(slot, meeting, {}), theirs), daemon=True)
            process.start()
            theirs.close()
            workers.append((process, ours))
        found: dict[str, list[float]] = await asyncio.to_thread(workers[0][1].recv)
        return found
    finally:
        for process, pipe in workers:
            await asyncio.to_thread(process.join, 20)
            process.kill()
            process.join()
            pipe.close()
        await server.aclose()


def draw(found: Mapping[str, Sequence[float]], directory: Path) -> Path:
    """Draw two panels, over the number of calls and over that of tensors; return the path of the picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), dpi=160, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    calls, in_a_call = figure.subplots(1, 2)
    for panel, name, label, colour in (
        (calls, "chained", "chained", "#d9480f"),
        (calls, "side by side", "side by side", "#5c6bc0"),
        (in_a_call, "tensors", "one call", "#d9480f"),
    ):
        panel.plot(SIZES, [value / 1e3 for value in found[name]], "o-", color=colour, label=label)
    calls.set_xlabel("calls in a context")
    in_a_call.set_xlabel("tensors that require grad")
    for panel in (calls, in_a_call):
        panel.set_xscale("log")
        panel.set_yscale("log")  # linear growth is a straight line of slope one
        panel.set_ylabel("CPU ms for a step, both workers")
        panel.grid(color="#d0d7de", linewidth=0.5)
        panel.legend(frameon=False, fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    path = directory / "autograd-growth.png"
    figure.savefig(path)
    return path


def main() -> int:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=Path, metavar="DIRECTORY", help="draw it there; takes matplotlib")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go")
    arguments = parser.parse_args()
    found = asyncio.run(measure())
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"sizes": SIZES, "us": found}, indent=1) + "\n")
    if arguments.plot is not None:
        print(f"drawn: {draw(found, arguments.plot)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
