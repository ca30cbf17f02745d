"""Pipeline parallelism with micro-batches: the more of them there are, the less the stages wait for each other.

    arpc launch --role trainer=1,stage=3 examples/pipeline.py

A model of three stages, each on a worker of its own. With one batch at a time a single stage works and the others wait;
cut into micro-batches, stage 1 works on the first of them while stage 0 is at the second. The trainer only states the
dependencies: every micro-batch is a chain of `remote` calls that do not wait, and activations go straight from stage to
stage. The model learns to read the handwritten digits that come with scikit-learn.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import arpc

PIXELS, WIDTH, CLASSES = 64, 256, 10


def load_digits() -> tuple[Tensor, Tensor]:
    """Return 1,797 images of handwritten digits and their labels, in a random order that is always the same."""
    from sklearn import datasets  # type: ignore[import-untyped]

    digits = datasets.load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(digits.data).float()[order] / 16, torch.from_numpy(digits.target)[order]


class Work(NamedTuple):
    """The forward pass of one micro-batch on one stage, with its times."""

    stage: int
    micro_batch: int
    began: float
    ended: float


class Stage:
    """Some layers of the model, which process one micro-batch after another."""

    def __init__(self, number: int, stages: int) -> None:
        self.number = number
        layers: list[nn.Module] = []
        for layer in range(4):
            layers += [nn.Linear(PIXELS if number == layer == 0 else WIDTH, WIDTH), nn.ReLU()]
        if number == stages - 1:
            layers[-1:] = [nn.Linear(WIDTH, CLASSES)]
        self.module = nn.Sequential(*layers)
        self.done: list[Work] = []
        self._turn = asyncio.Lock()

    async def forward(self, activations: arpc.RRef[Tensor] | Tensor, micro_batch: int) -> Tensor:
        """Run these layers on the output of the previous stage, which is on another worker."""
        inputs = await activations.to_here() if isinstance(activations, arpc.RRef) else activations
        async with self._turn:
            began = time.time()
            out: Tensor = await asyncio.to_thread(self.module, inputs)
            self.done.append(Work(self.number, micro_batch, began, time.time()))
        return out

    async def work(self) -> list[Work]:
        """Return the work done since the last call of this."""
        done, self.done = self.done, []
        return done

    def parameters(self) -> list[arpc.RRef[nn.Parameter]]:
        """Return RRefs to the parameters, for the optimizer."""
        return [arpc.RRef(parameter) for parameter in self.module.parameters()]


class Pipeline:
    """All stages, as the trainer sees them."""

    def __init__(self, stages: int) -> None:
        self.stages = [arpc.remote(f"stage{n}", Stage, (n, stages)) for n in range(stages)]

    async def forward(self, batch: Tensor, micro_batches: int) -> Tensor:
        """Start all micro-batches at once; return the scores of the whole batch."""
        ends: list[arpc.RRef[Tensor]] = []
        for number, part in enumerate(batch.chunk(micro_batches)):
            activations: arpc.RRef[Tensor] | Tensor = part
            for stage in self.stages:
                activations = stage.remote().forward(activations, number)  # does not wait
            assert isinstance(activations, arpc.RRef)
            ends.append(activations)
        return torch.cat(await asyncio.gather(*(end.to_here() for end in ends)))

    async def parameters(self) -> list[arpc.RRef[nn.Parameter]]:
        """Return RRefs to the parameters of all stages."""
        each = await asyncio.gather(*(stage.rpc_async().parameters() for stage in self.stages))
        return [parameter for parameters in each for parameter in parameters]

    async def work(self) -> list[Work]:
        """Return the work that the stages have done since the last call of this."""
        each = await asyncio.gather(*(stage.rpc_async().work() for stage in self.stages))
        return [work for done in each for work in done]


def picture(work: list[Work], stages: int, columns: int = 72) -> str:
    """Draw the forward pass as text: a row for each stage, a digit for each micro-batch, a dot where it waits."""
    began = min(one.began for one in work)
    scale = columns / (max(one.ended for one in work) - began)
    rows = [["."] * columns for _ in range(stages)]
    for one in work:
        first = int((one.began - began) * scale)
        for column in range(first, max(first + 1, min(columns, int((one.ended - began) * scale)))):
            rows[one.stage][min(column, columns - 1)] = str(one.micro_batch)
    return "\n".join(f"  stage{number} |{''.join(row)}|" for number, row in enumerate(rows))


async def train(stages: int, steps: int, batch: int, arguments: argparse.Namespace) -> None:
    """Train with more and more micro-batches, and show what the stages do meanwhile."""
    pipeline = Pipeline(stages)
    optimizer = await arpc.optim.DistributedOptimizer(torch.optim.Adam, await pipeline.parameters(), lr=1e-3)
    images, digits = load_digits()
    rows: list[str] = []
    for micro_batches in (1, 2, 4, 8):
        seconds, busy = 0.0, 0.0
        for step in range(steps):
            chosen = torch.randint(len(images), (batch,))
            async with arpc.autograd.context() as context_id:
                started = time.perf_counter()
                loss = cross_entropy(await pipeline.forward(images[chosen], micro_batches), digits[chosen])
                seconds += time.perf_counter() - started
                await arpc.autograd.backward(context_id, [loss])
                await optimizer.step(context_id)
            work = await pipeline.work()
            busy += sum(one.ended - one.began for one in work)
            if step == steps - 1:
                print(f"{micro_batches} micro-batches, the last forward pass; loss {loss.item():.3f}")
                print(picture(work, stages), flush=True)
        rows.append(f"{micro_batches:13}   {1e3 * seconds / steps:10.1f} ms   {busy / seconds / stages:10.0%}")
    print("micro-batches   forward pass   stages busy", *rows, sep="\n")
    if arguments.trace:
        async with arpc.profiler.profile() as profile:
            await pipeline.forward(images, 8)
        profile.export_html(arguments.trace)
        print(f"the trace of a forward pass is {arguments.trace}")


async def main(arguments: argparse.Namespace) -> None:
    """Run one process: the stages serve the trainer, until it leaves."""
    async with arpc.init_rpc() as worker:  # name, rank, secret and meeting place are in the environment
        if worker.name == "trainer0":
            stages = len(worker.get_worker_infos()) - 1
            await train(stages, arguments.steps, arguments.batch, arguments)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="how many steps with each number of micro-batches (10)")
    parser.add_argument("--batch", type=int, default=4096, help="how many images a step has (4096)")
    parser.add_argument(
        "--trace", metavar="FILE", help="where to leave a timeline to look at, such as build/trace.html"
    )
    torch.set_num_threads(1)
    arpc.run(main(parser.parse_args()))
