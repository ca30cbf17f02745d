"""Torch's state goes with a call into a thread, and a call leaves none behind."""

from __future__ import annotations

import asyncio
import contextvars
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from arpc.torchstate import DEFAULTS, call_isolated, capture, is_pristine, run_with, to_thread
from tests.torchstate.blocks import BLOCKS, observe


def test_call_isolated_returns_the_result_and_cleans_the_thread():
    def careless(a: int, *, b: int) -> int:
        torch.set_grad_enabled(False)
        torch.set_default_device("meta")
        return a + b

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(call_isolated, careless, 1, b=2).result() == 3
        assert pool.submit(capture).result() is DEFAULTS


def test_call_isolated_cleans_the_thread_of_a_function_that_raises():
    def careless() -> None:
        torch.inference_mode().__enter__()
        raise ValueError("boom")

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(ValueError, match="boom"):
            pool.submit(call_isolated, careless).result()
        assert pool.submit(is_pristine).result()


def test_run_with_puts_the_state_in_place_for_one_call():
    with torch.no_grad():
        state = capture()
    with torch.autocast("cpu"):
        before = observe()
        inside = run_with(state, observe)
        assert observe() == before
    assert not inside.grad_enabled
    assert not inside.autocast


def test_run_with_restores_the_thread_when_the_function_raises_and_leaves_a_mess():
    def messy() -> None:
        torch.set_default_device("meta")
        raise ValueError("boom")

    with torch.no_grad():
        with pytest.raises(ValueError, match="boom"):
            run_with(DEFAULTS, messy)
        assert capture().grad is False
        assert torch.ones(1).device.type == "cpu"


@pytest.mark.parametrize("name", sorted(BLOCKS))
async def test_to_thread_carries_torch_state_and_context(name):
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("set")
    with BLOCKS[name]():
        here = observe()
        call = asyncio.ensure_future(to_thread(lambda: (observe(), variable.get())))
        # Nothing isolates this test's task, so the call gets its state from a first step made in the block.
        await asyncio.sleep(0)
    assert await call == (here, "set")
    assert await asyncio.to_thread(is_pristine)


async def test_to_thread_passes_arguments_and_exceptions():
    assert await to_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await to_thread(divmod, 1, 0)
