"""Random programs whose values live on several workers, and the same programs in one process.

A program is a list of steps. Each makes one value on one worker out of earlier ones, which come from wherever they are:
with a reply, as an argument, through an RRef, in a stream, by way of a third worker. So the graph of the whole is cut
wherever a value changes place. Values are small integers where exact results are asked for.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import arpc

SIZE = 6


@dataclass(frozen=True)
class Step:
    worker: int
    kind: str
    inputs: tuple[int, ...] = ()
    ways: tuple[str, ...] = ()
    """How each input comes."""
    is_hooked: bool = False


@dataclass(frozen=True)
class Program:
    steps: tuple[Step, ...]
    roots: tuple[int, ...]
    is_exact: bool
    workers: int

    @property
    def leaves(self) -> list[int]:
        return [number for number, step in enumerate(self.steps) if step.kind == "leaf"]


WAYS = ("reply", "argument", "rref", "stream", "relay", "nested")
BINARY = ("add", "mul", "sub")
UNARY = ("twice", "reverse", "view", "in_place", "square", "detach_some")


def make_program(seed: int, workers: int, steps: int = 18) -> Program:
    dice = random.Random(seed)
    is_exact = seed % 2 == 0
    made = [Step(dice.randrange(workers), "leaf", is_hooked=dice.random() < 0.3) for _ in range(dice.randint(2, 4))]
    for _ in range(steps):
        kind = dice.choice(BINARY + UNARY)
        count = 2 if kind in BINARY else 1
        # late values are likelier, so that graphs are deep
        inputs = tuple(max(dice.randrange(len(made)) for _ in range(2)) for _ in range(count))
        ways = tuple(dice.choice(WAYS) for _ in inputs)
        made.append(Step(dice.randrange(workers), kind, inputs, ways, dice.random() < 0.3))
    candidates = range(len(made) // 2, len(made))
    roots = tuple(dice.sample(candidates, dice.randint(1, 3)))
    return Program(tuple(made), roots, is_exact, workers)


def make_leaf(number: int) -> Tensor:
    return (torch.arange(SIZE, dtype=torch.float64) % 3 + number % 2 - 1).requires_grad_()


def compute(kind: str, values: list[Tensor]) -> Tensor:  # noqa: PLR0911 - a table
    first = values[0]
    match kind:
        case "add":
            return first + values[1]
        case "mul":
            return torch.remainder(first, 5) * torch.remainder(values[1], 3)
        case "sub":
            return first - 2 * values[1]
        case "twice":
            return first + first
        case "reverse":
            return first.flip(0)
        case "view":
            return first.view(2, 3).t().reshape(-1)
        case "in_place":
            changed = first * 1
            changed.add_(1)
            changed[1:3].mul_(2)
            return changed
        case "square":
            return torch.remainder(first, 4) ** 2
        case "detach_some":
            return torch.cat([first[:3], first.detach()[3:]])
    raise AssertionError(kind)


def twist(gradient: Tensor) -> Tensor:
    """What a hook does: not linear, so that it must see the sum of all parts, once."""
    return torch.remainder(gradient * 3 + 1, 11)


@dataclass
class Place:
    """What one worker has of a run."""

    values: dict[int, Tensor] = field(default_factory=dict)
    hook_calls: Counter[int] = field(default_factory=Counter)

    def keep(self, number: int, step: Step, value: Tensor) -> None:
        self.values[number] = value
        if step.is_hooked and value.requires_grad:

            def hook(gradient: Tensor) -> Tensor:
                self.hook_calls[number] += 1
                return twist(gradient)

            value.register_hook(hook)


places: dict[tuple[int, str], Place] = {}


def place_of(run: int, worker: str | None = None) -> Place:
    name = worker or arpc.get_worker_info().name
    return places.setdefault((run, name), Place())


# -- handlers


@arpc.inline
def get_value(run: int, number: int) -> Tensor:
    return place_of(run).values[number]


def get_value_in_thread(run: int, number: int) -> Tensor:
    return place_of(run).values[number]


async def relay_value(owner: str, run: int, number: int) -> Tensor:
    return await arpc.rpc_sync(owner, get_value, (run, number))


async def stream_value(run: int, number: int) -> AsyncIterator[Tensor]:
    value = place_of(run).values[number]
    yield value[:2]
    yield value[2:]


async def make_value(run: int, program: Program, number: int, pushed: dict[str, list[Tensor]]) -> None:
    """Run one step where its value is to be. ``pushed`` are inputs that came as arguments."""
    step = program.steps[number]
    here = place_of(run)
    values: list[Tensor] = []
    for position, (source, way) in enumerate(zip(step.inputs, step.ways, strict=True)):
        owner = f"worker{program.steps[source].worker}"
        if str(position) in pushed:
            (value,) = pushed[str(position)]
        elif way == "rref":
            value = await arpc.remote(owner, get_value_in_thread, (run, source))
        elif way == "stream":
            value = torch.cat([part async for part in arpc.stream(owner, stream_value, (run, source))])
        elif way == "relay":
            through = f"worker{(step.worker + 1) % program.workers}"
            value = await arpc.rpc_sync(through, relay_value, (owner, run, source))
        elif source in here.values and number % 2:
            value = here.values[source]  # without a cut
        else:
            value = await arpc.rpc_sync(owner, get_value, (run, source))
        values.append(value)
    here.keep(number, step, compute(step.kind, values))


async def push_and_make(run: int, program: Program, number: int, position: int) -> None:
    """Run by the owner of an input, which hands it over as an argument."""
    step = program.steps[number]
    value = place_of(run).values[step.inputs[position]]
    await arpc.rpc_sync(f"worker{step.worker}", make_value, (run, program, number, {str(position): [value]}))


# -- the two ways to run it


async def run_forward(run: int, program: Program) -> list[Tensor]:
    """Run a program over the workers, from the current one, which gets the roots."""
    for number, step in enumerate(program.steps):
        worker = f"worker{step.worker}"
        if step.kind == "leaf":
            place_of(run, worker).keep(number, step, make_leaf(number))
            continue
        pushed = [position for position, way in enumerate(step.ways) if way in {"argument", "nested"}]
        if pushed:
            owner = f"worker{program.steps[step.inputs[pushed[0]]].worker}"
            await arpc.rpc_sync(owner, push_and_make, (run, program, number, pushed[0]))
        else:
            await arpc.rpc_sync(worker, make_value, (run, program, number, {}))
    roots = []
    for number in program.roots:
        value = await arpc.rpc_sync(f"worker{program.steps[number].worker}", get_value, (run, number))
        if value.requires_grad:
            roots.append(finish(value, program))
    return roots


def finish(value: Tensor, program: Program) -> Tensor:
    return value.sum() if program.is_exact else (value * 0.37).sin().sum()


def run_reference(program: Program) -> tuple[dict[int, Tensor | None], Counter[int], bool]:
    """Gradients of the leaves, how often each hook ran, and whether there was a root at all."""
    place = Place()
    for number, step in enumerate(program.steps):
        if step.kind == "leaf":
            place.keep(number, step, make_leaf(number))
        else:
            place.keep(number, step, compute(step.kind, [place.values[source] for source in step.inputs]))
    roots = [finish(place.values[number], program) for number in program.roots if place.values[number].requires_grad]
    leaves = [place.values[number] for number in program.leaves]
    if not roots:
        return dict.fromkeys(program.leaves), place.hook_calls, False
    gradients = torch.autograd.grad(roots, leaves, allow_unused=True)
    return dict(zip(program.leaves, gradients, strict=True)), place.hook_calls, True


def forget(run: int) -> None:
    for key in [key for key in places if key[0] == run]:
        del places[key]


def gradients_of(group: Any, ctx_id: int, run: int, program: Program) -> dict[int, Tensor | None]:
    found: dict[int, Tensor | None] = {}
    for number in program.leaves:
        worker = group[program.steps[number].worker]
        leaf = place_of(run, worker.name).values[number]
        context = worker.autograd.container.contexts.get(ctx_id)
        found[number] = None if context is None else context.gradients.get(leaf)
    return found
