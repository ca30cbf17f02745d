"""A transformer split over workers, trained with distributed autograd: it learns to read digits.

    arpc launch --role trainer=1,lower=1,upper=1 examples/split_transformer.py

The embedding and the first layers live on the worker lower0, the others and the head on upper0; the trainer has the
data and the loss. Activations go from worker to worker in the forward pass, gradients back in the backward pass, and
the parameters stay where they are: an optimizer on each worker updates its own. The images are the handwritten digits
that come with scikit-learn; the transformer reads the eight rows of an image as a sequence.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import arpc

ROWS, PIXELS, DIGITS = 8, 8, 10  # an image has 8 rows of 8 pixels
WIDTH = 64
UNSEEN = 400  # images that are kept for testing


def load_digits() -> tuple[Tensor, Tensor]:
    """Return 1,797 images of handwritten digits and their labels, in a random order that is always the same."""
    from sklearn import datasets  # type: ignore[import-untyped]

    digits = datasets.load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(digits.images).float()[order] / 16, torch.from_numpy(digits.target)[order]


def make_layers(count: int) -> nn.TransformerEncoder:
    """Make some layers of the transformer."""
    layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=128, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, count, enable_nested_tensor=False)


class Lower(nn.Module):
    """The lower half: from the rows of images to hidden states."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.rows = nn.Linear(PIXELS, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(ROWS, WIDTH))
        self.layers = make_layers(layers)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.layers(self.rows(images) + self.places)
        return out


class Upper(nn.Module):
    """The upper half: from hidden states to a score for each digit."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = make_layers(layers)
        self.head = nn.Linear(WIDTH, DIGITS)

    def forward(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(hidden).mean(dim=1))
        return scores


class Transformer(nn.Module):
    """Both halves, on other workers. It is made and called like any module, with an `await`."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.lower = arpc.nn.RemoteModule("lower0", Lower, (layers,))
        self.upper = arpc.nn.RemoteModule("upper0", Upper, (layers,))

    async def forward(self, images: Tensor) -> Tensor:
        return await self.upper(await self.lower(images))


async def train(steps: int) -> tuple[list[float], float]:
    """Train; return the loss of each step, and the final accuracy on unseen images."""
    images, digits = load_digits()
    model = Transformer(layers=1)
    parameters = await arpc.nn.parameter_rrefs(model)
    optimizer = await arpc.optim.DistributedOptimizer(torch.optim.Adam, parameters, lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    print(optimizer, flush=True)
    losses: list[float] = []
    for step in range(1, steps + 1):
        chosen = torch.randint(UNSEEN, len(images), (64,))
        async with arpc.autograd.context() as context_id:
            loss = cross_entropy(await model(images[chosen]), digits[chosen])
            await arpc.autograd.backward(context_id, [loss])
            await optimizer.step(context_id)
        scheduler.step()
        losses.append(loss.item())
        if step % max(1, steps // 10) == 0:
            print(f"{step:5} steps   loss {loss.item():.3f}", flush=True)
    with arpc.no_grad():
        read = (await model(images[:UNSEEN])).argmax(dim=1)
        right = (read == digits[:UNSEEN]).float().mean().item()
    return losses, right


def draw(losses: list[float], path: Path) -> None:
    """Draw the losses."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    axes.plot(losses)
    axes.set(
        title="A transformer on two workers learns to read digits", xlabel="steps", ylabel="cross-entropy", yscale="log"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


async def main(arguments: argparse.Namespace) -> None:
    """Run one process: the other workers serve the trainer, until it leaves."""
    async with arpc.init_rpc() as worker:  # name, rank, secret and meeting place are in the environment
        if worker.name != "trainer0":
            return
        started = time.perf_counter()
        losses, right = await train(arguments.steps)
        seconds = time.perf_counter() - started
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, {right:.1%} of the digits right")
    print(f"{len(losses) / seconds:.0f} steps/s, each forwards and backwards through two other workers")
    if arguments.plot:
        draw(losses, arguments.plot)
        print(f"the picture is {arguments.plot}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="how many batches to learn from (400)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw the loss, such as build/loss.png")
    torch.set_num_threads(1)
    arpc.run(main(parser.parse_args()))
