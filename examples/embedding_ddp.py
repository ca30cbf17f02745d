"""An embedding on a server, and the rest of the model in DistributedDataParallel: RPC and gloo in one program.

    arpc launch --role server=1,trainer=2 examples/embedding_ddp.py

The table is the part that, in real life, does not fit on a trainer: it lives on the server, and trainers look up the
rows that they need. The layers above it are small: each trainer has a copy, and DistributedDataParallel keeps the
copies equal, averaging their gradients by gloo in the middle of the same backward pass that sends the table's gradients
to the server.

The model reads 32 words of this project's own docs and learns which page they are from.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import time
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import arpc

SERVER = "server0"  # the launcher numbers the workers of each role
DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = ("autograd", "launch", "rref", "security")
BAG, BLOCK, WIDTH = 32, 64, 32


class Docs:
    """Bags of neighbouring words of some pages. Every fifth block of a page is kept for testing."""

    def __init__(self) -> None:
        pages = [re.findall(r"\w+", (DOCS / f"{page}.md").read_text(encoding="utf-8").lower()) for page in PAGES]
        vocabulary = {word: number for number, word in enumerate(sorted({word for page in pages for word in page}))}
        numbers = [torch.tensor([vocabulary[word] for word in page]) for page in pages]
        bags = [[block.unfold(0, BAG, 1) for block in page.unfold(0, BLOCK, BLOCK)] for page in numbers]
        self.words = len(vocabulary)
        self.unseen = [torch.cat(page[::5]) for page in bags]
        self.known = [torch.cat([one for number, one in enumerate(page) if number % 5]) for page in bags]

    @staticmethod
    def draw(bags: list[Tensor], size: int, dice: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw some bags at random; return them with the number of the page that each is from."""
        pages = torch.randint(len(bags), (size,), generator=dice)
        words = [bags[page][int(torch.randint(len(bags[page]), (), generator=dice))] for page in pages.tolist()]
        return torch.stack(words), pages


def make_table(words: int) -> nn.EmbeddingBag:
    """Make the table, with small initial values, so that rare words matter less."""
    table = nn.EmbeddingBag(words, WIDTH, mode="mean")
    nn.init.normal_(table.weight, std=0.1)
    return table


class Model(nn.Module):
    """The model: the table on the server, and the layers on this trainer."""

    def __init__(self, table: arpc.nn.RemoteModule[nn.EmbeddingBag], layers: nn.Module) -> None:
        super().__init__()
        self.table = table
        self.layers = layers

    async def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.layers(await self.table(words))
        return scores


def join_trainers() -> int:
    """Make the process group of the trainers, besides arpc's group of all workers; return this one's rank in it."""
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank, size = int(os.environ["ARPC_ROLE_RANK"]), int(os.environ["ARPC_ROLE_SIZE"])
    distributed.init_process_group("gloo", store=PrefixStore("trainers", store), rank=rank, world_size=size)
    return rank


async def train(table: arpc.nn.RemoteModule[nn.EmbeddingBag], steps: int) -> str:
    """Train; return the last biases of this copy of the layers, as text. Called by trainer0 on every trainer."""
    rank = await asyncio.to_thread(join_trainers)
    copy = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, len(PAGES)))
    layers = await asyncio.to_thread(DistributedDataParallel, copy)  # blocks until the others come, so not on the loop
    arpc.autograd.heed_accumulate_hooks(layers.parameters())  # DistributedDataParallel's hooks, which average
    model, docs, dice = Model(table, layers), Docs(), torch.Generator().manual_seed(rank)
    optimizer = await arpc.optim.DistributedOptimizer(torch.optim.Adam, await arpc.nn.parameter_rrefs(model), lr=3e-3)
    started = time.perf_counter()
    for step in range(1, steps + 1):
        words, pages = docs.draw(docs.known, 64, dice)
        async with arpc.autograd.context() as context_id:
            loss = cross_entropy(await model(words), pages)
            await arpc.autograd.backward(context_id, [loss])
            await optimizer.step(context_id)
        if rank == 0 and step % max(1, steps // 10) == 0:
            print(f"{step:5} steps   loss {loss.item():.3f}", flush=True)
    if rank == 0:
        with arpc.no_grad():
            words, pages = docs.draw(docs.unseen, 1000, dice)
            right = ((await model(words)).argmax(dim=1) == pages).float().mean().item()
        rate = steps * distributed.get_world_size() / (time.perf_counter() - started)
        print(f"{right:.1%} of the bags of unseen text right, {rate:.0f} batches/s over all trainers")
    distributed.destroy_process_group()
    return ", ".join(f"{value:.6f}" for value in layers.module[2].bias.tolist())


async def main(arguments: argparse.Namespace) -> None:
    """Run one process: all workers serve the first trainer, until it leaves."""
    async with arpc.init_rpc() as worker:  # name, rank, secret and meeting place are in the environment
        if worker.name == "trainer0":
            table = arpc.nn.RemoteModule.at(SERVER)(make_table, Docs().words)
            trainers = [one.name for one in worker.get_worker_infos() if one.name != SERVER]
            # all trainers get a handle to the same table
            training = [arpc.rpc_async(one, train, (table, arguments.steps), timeout=0) for one in trainers]
            ends = await asyncio.gather(*training)
            for name, end in zip(trainers, ends, strict=True):
                print(f"{name}: the last biases are {end}")
            print(f"the copies are {'equal' if len(set(ends)) == 1 else 'NOT equal'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="how many batches each trainer learns from (300)")
    torch.set_num_threads(1)
    arpc.run(main(parser.parse_args()))
