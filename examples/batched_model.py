"""A model that serves many callers at once: the same calls with one forward pass each, and batched by `arpc.batched`.

    python examples/batched_model.py --callers 64

This process, the client, starts the server, a process that has the model: a network which learns to read the
handwritten digits of scikit-learn before it serves. Each image is enlarged to 16 by 16 pixels.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import arpc

INPUTS = 256  # pixels of an image
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(INPUTS, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def load_digits() -> tuple[Tensor, Tensor]:
    """Return 1,797 images of handwritten digits and their labels, in a random order that is always the same."""
    from sklearn import datasets  # type: ignore[import-untyped]

    digits = datasets.load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(digits.images).float()[order] / 16
    enlarged = images.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
    return enlarged.flatten(1), torch.from_numpy(digits.target)[order]


def learn() -> None:
    """Train the model on all images but the first 400."""
    images, digits = (part[400:] for part in load_digits())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(4):
        for chosen in torch.randperm(len(images)).chunk(22):
            optimizer.zero_grad()
            torch.autograd.backward(cross_entropy(model(images[chosen]), digits[chosen]))
            optimizer.step()
    model.requires_grad_(requires_grad=False)


def one_by_one(x: Tensor) -> Tensor:
    """Run the model on one input."""
    return model(x)  # type: ignore[no-any-return]


@arpc.batched(max_size=32, max_wait_ms=2)
def together(x: Tensor) -> Tensor:
    """Run the model on a batch: the inputs of as many callers as are waiting, 32 at most."""
    return model(x)  # type: ignore[no-any-return]


async def processor_time_s() -> float:
    """Return the CPU time that this process has used so far."""
    return time.process_time()


async def measure(function: Callable[..., Any], callers: int, calls: int) -> str:
    """Measure concurrent callers of a function, each of which makes one call after another; return a line of text."""
    images, _ = load_digits()

    async def caller() -> None:
        for image in images[:calls]:
            await arpc.rpc_sync("server", function, args=(image,))

    used_s = await arpc.rpc_sync("server", processor_time_s)
    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(callers):
            group.create_task(caller())
    rate = callers * calls / (time.perf_counter() - begin)
    used_s = await arpc.rpc_sync("server", processor_time_s) - used_s
    return f"{rate:8,.0f} calls/s, {used_s / (callers * calls) * 1e6:6,.0f} us of the server's processor for each"


async def run_client(init_method: str, callers: int, calls: int) -> None:
    """Compare both ways, and print the results."""
    async with arpc.init_rpc("client", rank=0, world_size=2, init_method=init_method):
        images, digits = (part[:400] for part in load_digits())  # the model has not seen these
        alone = await arpc.rpc_sync("server", one_by_one, args=(images[1],))
        batch = await asyncio.gather(*[arpc.rpc_async("server", together, args=(image,)) for image in images])
        print("the same answer:", torch.allclose(alone, batch[1], atol=1e-5))
        print(f"digits right: {(torch.stack(batch).argmax(dim=1) == digits).float().mean().item():.1%}")
        for _ in range(2):  # the first time is the warm-up
            lines = [await measure(function, callers, calls) for function in (one_by_one, together)]
        print(f"{callers} callers, one by one:  {lines[0]}")
        print(f"{callers} callers, together:    {lines[1]}")


async def run_server(init_method: str) -> None:
    """Train the model, and serve it until the client is done."""
    learn()
    async with arpc.init_rpc("server", rank=1, world_size=2, init_method=init_method):
        pass  # leaving the block waits until no worker has work left


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--calls", type=int, default=30, help="of each caller")
    parser.add_argument("--server", metavar="INIT_METHOD", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.server:
        arpc.run(run_server(options.server))
        return
    with tempfile.TemporaryDirectory() as folder:
        init_method = f"file://{folder}/group"
        os.environ.setdefault("ARPC_SECRET", secrets.token_hex())
        with subprocess.Popen([sys.executable, __file__, "--server", init_method]) as server:
            try:
                arpc.run(run_client(init_method, options.callers, options.calls))
            except BaseException:
                server.terminate()
                raise


if __name__ == "__main__":
    main()
