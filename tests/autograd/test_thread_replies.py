"""Plain functions in a context whose threads record and send the answer themselves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import arpc
from arpc.autograd.contexts import AutogradContext
from arpc.testing import Cluster, cluster
from arpc.transport.sockets import UnixTransport
from tests.autograd.conftest import OPTIONS, assert_nothing_is_left

UNIX = OPTIONS.replace(listen=("unix://",), shared_memory_bytes=0)
CHAIN = 8


def mul(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum()


def without_grad(x: Tensor) -> Tensor:
    return x.detach() * 2


def nothing(x: Tensor) -> None:
    assert x.requires_grad


def call_back(x: Tensor) -> Tensor:
    return 2 * arpc.rpc_async("worker0", mul, (x, x)).wait()


@pytest.fixture
async def pair() -> AsyncIterator[Cluster]:
    """Two workers with a socket between them, on which threads may write."""
    async with cluster(2, options=UNIX, transports={"unix": UnixTransport()}) as workers:
        await workers[0].rpc_sync("worker1", nothing, (torch.ones(1, requires_grad=True),))
        yield workers
        assert_nothing_is_left(workers)


@pytest.fixture
def recorded_in(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads in which tensors were recorded that leave a worker."""
    threads: list[int] = []
    record = AutogradContext.record_send

    def noted(context: AutogradContext, *args: object, **kwargs: object) -> tuple[int, int]:
        threads.append(threading.get_ident())
        return record(context, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(AutogradContext, "record_send", noted)
    return threads


def answered_by_threads(group: Cluster) -> int:
    return group[1].agent.dispatcher.threads.jobs_answered


async def step(x: Tensor, y: Tensor) -> dict[Tensor, Tensor]:
    async with arpc.autograd.context() as ctx_id:
        value = y
        for _ in range(CHAIN):
            value = await arpc.rpc_sync("worker1", mul, (x, value))
        await arpc.autograd.backward(ctx_id, [value])
        return arpc.autograd.get_gradients(ctx_id)


def expected(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    value = y
    for _ in range(CHAIN):
        value = mul(x, value)
    return torch.autograd.grad(value, [x, y])


def leaves() -> tuple[Tensor, Tensor]:
    return torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)


async def test_the_thread_that_ran_a_function_records_and_sends_its_answer(pair, recorded_in):
    x, y = leaves()
    await step(x, y)  # the layout of the tensors is announced by the loop
    recorded_in.clear()
    before = answered_by_threads(pair)
    found = await step(x, y)
    assert answered_by_threads(pair) - before == CHAIN
    here = threading.get_ident()
    assert sorted(thread == here for thread in recorded_in) == [False] * CHAIN + [True] * CHAIN
    torch.testing.assert_close((found[x], found[y]), expected(x, y))


async def test_contexts_side_by_side_have_the_gradients_of_one_process(pair):
    starts = [leaves() for _ in range(16)]
    for found, (x, y) in zip(await asyncio.gather(*[step(x, y) for x, y in starts]), starts, strict=True):
        torch.testing.assert_close((found[x], found[y]), expected(x, y))


async def test_calls_side_by_side_in_one_context(pair):
    x, y = leaves()
    async with arpc.autograd.context() as ctx_id:
        values = await asyncio.gather(*[arpc.rpc_sync("worker1", mul, (x, y * number)) for number in range(40)])
        await arpc.autograd.backward(ctx_id, [torch.stack(values).sum()])
        found = arpc.autograd.get_gradients(ctx_id)
    total = torch.stack([mul(x, y * number) for number in range(40)]).sum()
    torch.testing.assert_close((found[x], found[y]), torch.autograd.grad(total, [x, y]))


@pytest.mark.parametrize("function", [without_grad, nothing])
async def test_an_answer_that_records_nothing_takes_the_loop(pair, recorded_in, function):
    x, _ = leaves()
    before = answered_by_threads(pair)
    async with arpc.autograd.context():
        await arpc.rpc_sync("worker1", function, (x,))
    assert answered_by_threads(pair) == before
    assert len(recorded_in) == 1  # the argument


async def test_a_function_that_has_made_calls_is_answered_by_the_loop(pair):
    x, _ = leaves()
    before = answered_by_threads(pair)
    async with arpc.autograd.context() as ctx_id:
        value = await arpc.rpc_sync("worker1", call_back, (x,))
        await arpc.autograd.backward(ctx_id, [value])
        torch.testing.assert_close(arpc.autograd.get_gradients(ctx_id)[x], 4 * x.detach())
    assert answered_by_threads(pair) == before


async def test_a_worker_leaves_a_context_that_its_threads_have_answered_in(pair):
    """After a pass nothing is left there, and it says so with the answer: leaving takes no message."""
    x, y = leaves()
    async with arpc.autograd.context() as ctx_id:
        value = await arpc.rpc_sync("worker1", mul, (x, y))
        assert pair[1].autograd.container.contexts
        await arpc.autograd.backward(ctx_id, [value])
        assert not pair[1].autograd.container.contexts
        assert not pair[0].autograd.container.find(ctx_id).known_workers


class Reduced:
    """Counts how often it is pickled, and notes which worker it is pickled on."""

    pickled: ClassVar[list[str]] = []

    def __reduce__(self) -> tuple[type, tuple[()]]:
        self.pickled.append(arpc.get_worker_info().name)
        return Reduced, ()


def make_reduced() -> Reduced:
    return Reduced()


async def test_a_result_without_tensors_is_pickled_once_and_on_its_worker(pair):
    Reduced.pickled.clear()
    async with arpc.autograd.context():
        assert isinstance(await arpc.rpc_sync("worker1", make_reduced), Reduced)
    assert Reduced.pickled == ["worker1"]


async def test_hooks_of_a_pass_see_the_context_variables_of_their_caller(pair):
    var: ContextVar[str] = ContextVar("var", default="unset")
    seen: list[str] = []

    async def run(name: str) -> None:
        x, y = leaves()
        middle = x * 2

        def hook(gradient: Tensor) -> None:
            seen.append(var.get())
            var.set(f"hook of {name}")

        middle.register_hook(hook)
        var.set(name)
        async with arpc.autograd.context() as ctx_id:
            await arpc.autograd.backward(ctx_id, [await arpc.rpc_sync("worker1", mul, (middle, y))])

    for name in ("first", "second"):
        await asyncio.create_task(run(name))
    assert seen == ["first", "second"]
