"""Streaming inference: a server sends each character as soon as it is computed, and stops when the reader leaves.

    arpc launch --role reader=1,server=1 examples/streaming_inference.py

The server first learns to write like a page of this project's documentation, letter by letter. Then readers stream from
it: several at once, each with its own beginning; one that leaves in the middle, whereupon the server stops working for
it; and a slow one, for which the server computes ahead by no more than the window.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import arpc

SERVER = "server0"  # the launcher numbers the workers of each role
PAGE = Path(__file__).resolve().parent.parent / "docs" / "calls.md"
LETTERS = " abcdefghijklmnopqrstuvwxyz.,:;'-()"
NUMBER = {letter: number for number, letter in enumerate(LETTERS)}
BEGINNINGS = ("a call ", "the worker ", "if the ", "when a ")


def read_prose(page: Path) -> str:
    """Return the prose of a page: without code, tables and headings, in lower case."""
    text = re.sub(r"```.*?```", " ", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith(("#", "|", "!", "<"))]
    return re.sub(f"[^{re.escape(LETTERS)}]+", " ", " ".join(lines).lower())


class Model(nn.Module):
    """A model that predicts the next letter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), 32)
        self.remember = nn.GRU(32, 128, batch_first=True)
        self.score = nn.Linear(128, len(LETTERS))

    def forward(self, letters: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out, state = self.remember(self.embed(letters), state)
        assert state is not None
        return self.score(out), state


def learn_text(prose: str, steps: int) -> tuple[Model, float]:
    """Train a model on the text; return it with its final loss, in bits per letter."""
    torch.manual_seed(0)
    model, text = Model(), torch.tensor([NUMBER[letter] for letter in prose])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    bits = math.log2(len(LETTERS))
    for _ in range(steps):
        starts = torch.randint(len(text) - 65, (16, 1))
        windows = text[starts + torch.arange(65)]
        scores, _ = model(windows[:, :-1])
        loss = cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        bits = loss.item() / math.log(2)
    return model.eval(), bits


# -- the server -------------------------------------------------------------------------------------------------------

model: Model  # exists in the server's process only, where the functions below run
computed: dict[str, int] = {}  # the number of letters computed for each reader


async def prepare(prose: str, steps: int) -> float:
    """Learn the text. This takes some seconds, in a thread: the server could serve other calls meanwhile."""
    global model
    model, bits = await asyncio.to_thread(learn_text, prose, steps)
    return bits


async def write(reader: str, beginning: str, length: int) -> AsyncIterator[str]:
    """Yield a continuation of a beginning, letter by letter."""
    computed[reader] = 0
    dice = torch.Generator().manual_seed(0)
    with arpc.no_grad():  # unlike torch's own, it may be active across a yield
        scores, state = model(torch.tensor([[NUMBER[letter] for letter in beginning]]))
        for _ in range(length):
            number = torch.multinomial((scores[0, -1] / 0.6).softmax(dim=0), 1, generator=dice)
            computed[reader] += 1
            yield LETTERS[int(number)]
            scores, state = model(number.reshape(1, 1), state)


async def letters_computed() -> dict[str, int]:
    """Return the number of letters computed for each reader."""
    return computed


# -- the reader -------------------------------------------------------------------------------------------------------


async def read(
    reader: str, beginning: str, length: int, *, window: int = 16, leave: Callable[[str], bool] | None = None
) -> tuple[str, list[float]]:
    """Read until the end, or until `leave` is true of the text; return the text, and the seconds until each letter."""
    text, started, times = "", time.perf_counter(), list[float]()
    async for letter in arpc.stream(SERVER, write, (reader, beginning, length), window=window):
        text += letter
        times.append(time.perf_counter() - started)
        if leave is not None and leave(text):
            break  # which cancels the generator on the server
    return text, times


async def show(arguments: argparse.Namespace) -> None:
    """Show the features of streams."""
    prose = read_prose(arguments.page)
    print(f"the server learns {arguments.page.name}, {len(prose):,} letters of it ...", flush=True)
    bits = await arpc.rpc_sync(SERVER, prepare, (prose, arguments.steps), timeout=0)
    print(f"it lacks {bits:.2f} bits to guess a letter, and lacked {math.log2(len(LETTERS)):.2f} before")
    together = await asyncio.gather(
        *(read(f"reader{number}", beginning, arguments.length) for number, beginning in enumerate(BEGINNINGS))
    )
    for beginning, (text, times) in zip(BEGINNINGS, together, strict=True):
        print(f"{beginning}|{text[:60]}...   first letter {1e3 * times[0]:.1f} ms, all {1e3 * times[-1]:.0f} ms")
    text, _ = await read("leaver", BEGINNINGS[0], 100_000, leave=lambda text: len(text) == 60)
    slow = arpc.stream(SERVER, write, ("slow", BEGINNINGS[0], 100_000), window=4)
    first = await anext(slow)  # reads one letter, and no more
    done = await arpc.rpc_sync(SERVER, letters_computed)
    print(f"left after {len(text)} letters: the server computed {done['leaver']} of 100,000")
    print(f"read one letter, {first!r}, with a window of 4: the server computed {done['slow']}")
    await slow.aclose()


async def main(arguments: argparse.Namespace) -> None:
    """Run one process: the server serves the reader, until it leaves."""
    async with arpc.init_rpc() as worker:  # name, rank, secret and meeting place are in the environment
        if worker.name != SERVER:
            await show(arguments)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=PAGE, help="what the server learns (docs/calls.md)")
    parser.add_argument("--steps", type=int, default=400, help="how long the server learns (400)")
    parser.add_argument("--length", type=int, default=200, help="how many letters are read (200)")
    torch.set_num_threads(1)
    arpc.run(main(parser.parse_args()))
