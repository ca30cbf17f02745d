"""A trace of one step of training over three workers, as a picture.

    python examples/trace_training.py

A network that reads handwritten digits is cut in two stages, each on a worker of its own. A third worker, the trainer,
sends a batch through both in two halves, runs a backward pass over all three and lets an optimizer take its step. The
last of a few steps is recorded and written to ``build/trace.html``, which any browser opens, and ``build/trace.json``,
for https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import arpc

STAGES = ("stage1", "stage2")
WARM_UP_STEPS = 5


def load_digits() -> tuple[Tensor, Tensor]:
    """Return 1,797 images of handwritten digits and their labels, in a random order that is always the same."""
    from sklearn import datasets  # type: ignore[import-untyped]

    digits = datasets.load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(digits.data).float()[order] / 16, torch.from_numpy(digits.target)[order]


class Stage(nn.Module):
    """Half of the network, on the worker that owns it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, 512), nn.ReLU(), nn.Linear(512, outputs))

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.layers(value)
        return result

    def parameter_rrefs(self) -> list[arpc.RRef[nn.Parameter]]:
        """Return RRefs to the parameters, for the optimizer, which updates them on their worker."""
        return [arpc.RRef(parameter) for parameter in self.parameters()]


async def run_first(stage: arpc.RRef[Stage], half: Tensor) -> Tensor:
    """Run the first stage on half a batch; its result stays on this worker."""
    module = await stage.local_value()
    return module.forward(half)


async def run_second(stage: arpc.RRef[Stage], hidden: arpc.RRef[Tensor]) -> Tensor:
    """Fetch the result of the first stage, and run the second stage on it."""
    module = await stage.local_value()
    return module.forward(await hidden.to_here())


async def train_step(
    stages: list[arpc.RRef[Stage]], optimizer: arpc.optim.DistributedOptimizer, images: Tensor, digits: Tensor
) -> float:
    """Run both halves at once, the backward pass, and an optimizer step; return the loss."""
    first, second = stages
    async with arpc.autograd.context() as context_id:
        hidden = [arpc.remote(first.owner(), run_first, args=(first, half)) for half in images.chunk(2)]
        outputs = await asyncio.gather(
            *(arpc.rpc_async(second.owner(), run_second, args=(second, half)) for half in hidden)
        )
        loss = cross_entropy(torch.cat(outputs), digits)
        await arpc.autograd.backward(context_id, [loss])
        await optimizer.step(context_id)
    return float(loss.item())


async def drive(place: str, folder: Path) -> None:
    """Start the processes, train, and write the trace."""
    os.environ |= {"WORLD_SIZE": "3", "ARPC_SECRET": secrets.token_hex(), "OMP_NUM_THREADS": "1"}
    async with asyncio.TaskGroup() as group:
        for rank in (1, 2):
            group.create_task(run_process(rank, place))
        async with arpc.init_rpc("trainer", rank=0, init_method=place):
            sizes = ((64, 256), (256, 10))
            stages = [arpc.remote(name, Stage, args=size) for name, size in zip(STAGES, sizes, strict=True)]
            parameters = [rref for stage in stages for rref in await stage.rpc_sync().parameter_rrefs()]
            optimizer = arpc.optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.05)
            images, digits = load_digits()
            batch = images[:512], digits[:512]
            for _ in range(WARM_UP_STEPS):
                await train_step(stages, optimizer, *batch)
            async with arpc.profiler.profile() as prof:
                await train_step(stages, optimizer, *batch)
            del stages, parameters, optimizer
        prof.export_html(folder / "trace.html", title="One step of training, three workers")
        prof.export_chrome_trace(folder / "trace.json")
        trace = prof.trace
        print(f"{len(trace.workers)} workers, {len(trace.arrows())} calls, {trace.duration_ns / 1e6:.1f} ms")
        print(f"clocks agree within {trace.error_ns / 1000:.0f} us")
        print(f"written: {folder / 'trace.html'} and {folder / 'trace.json'}")


async def run_process(rank: int, place: str) -> None:
    """Run the process of one of the stages, until the group has ended."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--worker", place, env={**os.environ, "RANK": str(rank)}
    )
    try:
        if await process.wait():
            raise RuntimeError(f"the process of rank {rank} has failed")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def serve(place: str) -> None:
    """Run a worker until the whole group has finished."""
    async with arpc.init_rpc(STAGES[int(os.environ["RANK"]) - 1], init_method=place):
        pass


def main() -> None:
    """Parse the command line, and run the trainer or one of the stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--to", type=Path, default=Path("build"), help="the folder that the trace is written to (build)"
    )
    parser.add_argument("--worker", metavar="PLACE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.worker:
        arpc.run(serve(arguments.worker))
        return
    arguments.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        arpc.run(drive(f"file://{folder}/group", arguments.to))


if __name__ == "__main__":
    main()
