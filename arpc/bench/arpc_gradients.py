"""Distributed autograd with arpc: one step after another, forward, backward and the end of the context."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import cast

from torch import Tensor

import arpc
from arpc.bench.asyncio_caller import AsyncioCaller, latency_figures
from arpc.bench.gradients import (
    BLOCKS,
    CONTEXTS,
    FAN_OUT,
    arithmetic_s,
    deepen,
    leaves,
    mul_async,
    pass_on_async,
    run_block,
    run_block_async,
    sequences,
    timed_engine,
    total,
)
from arpc.bench.systems import WARM_UP_SHARE, Measurement, callee_name

__all__ = ["ArpcGradients"]

_LEAST_PASSES = 5


class ArpcGradients(AsyncioCaller):
    """The measurements of autograd."""

    async def autograd_op(self, *, budget_s: float) -> Measurement:
        """Measure one operation on another worker, forward and backward: ``p50_us``."""
        x, y = leaves()

        async def step() -> None:
            await _one_op(x, y)

        await self._one_by_one(step, budget_s * WARM_UP_SHARE)
        return latency_figures(await self._one_by_one(step, budget_s))

    async def autograd_contexts(self, *, budget_s: float) -> Measurement:
        """Measure one remote operation, forward and backward, in several contexts at once."""
        x, y = leaves()

        async def step() -> None:
            await asyncio.gather(*(_one_op(x, y) for _ in range(CONTEXTS)))

        await self._one_by_one(step, budget_s * WARM_UP_SHARE)
        return latency_figures(await self._one_by_one(step, budget_s))

    async def autograd_group(self, *, budget_s: float) -> Measurement:
        """Measure more workers: ``chain_us`` of a chain of calls, ``fan_out_us`` of concurrent calls to many."""
        x, y = leaves()

        async def chain() -> None:
            async with arpc.autograd.context() as ctx_id:
                result = await arpc.rpc_sync(callee_name(0), pass_on_async, (x, callee_name(1)))
                await arpc.autograd.backward(ctx_id, [result.sum()])
                assert len(arpc.autograd.get_gradients(ctx_id)) == 1

        async def fan_out() -> None:
            async with arpc.autograd.context() as ctx_id:
                calls = [arpc.rpc_async(callee_name(peer), mul_async, (x, y)) for peer in range(FAN_OUT)]
                results = [await call for call in calls]
                await arpc.autograd.backward(ctx_id, [cast("Tensor", sum(results)).sum()])
                assert len(arpc.autograd.get_gradients(ctx_id)) == 2

        figures: Measurement = {}
        for name, step in (("chain_us", chain), ("fan_out_us", fan_out)):
            await self._one_by_one(step, budget_s * WARM_UP_SHARE)
            figures[name] = latency_figures(await self._one_by_one(step, budget_s))["p50_us"]
        return figures

    async def autograd_transformer(self, *, budget_s: float) -> Measurement:
        """Measure a step of a transformer over two workers: ``p50_us``, and the share of ``arithmetic`` in it."""

        async def step() -> None:
            async with arpc.autograd.context() as ctx_id:
                values = sequences()
                for number in range(0, BLOCKS, 2):
                    calls = [
                        arpc.rpc_async(callee_name(0), run_block_async, (number + 1, run_block(number, value)))
                        for value in values
                    ]
                    values = [await call for call in calls]
                await arpc.autograd.backward(ctx_id, [total(values)])
                assert arpc.autograd.get_gradients(ctx_id)

        await self._one_by_one(step, budget_s * WARM_UP_SHARE)
        figures = latency_figures(await self._one_by_one(step, budget_s))
        return figures | {"arithmetic": 1e6 * arithmetic_s() / figures["p50_us"]}

    async def autograd_outside(self, *, nodes: int, budget_s: float) -> Measurement:
        """Measure a pass over ``nodes`` nodes of this worker: the ``share`` of its CPU time outside torch's engine.

        CPU time leaves out the waits of threads for their turn, which are short on an idle machine.
        """
        x, _ = leaves()
        shares: list[float] = []
        with timed_engine() as clock:

            async def step() -> None:
                async with arpc.autograd.context() as ctx_id:
                    root = deepen(x, nodes).sum()
                    clock.seconds = 0.0
                    begun = time.process_time()
                    await arpc.autograd.backward(ctx_id, [root])
                    shares.append(1 - clock.seconds / (time.process_time() - begun))

            await self._one_by_one(step, budget_s * WARM_UP_SHARE)
            shares.clear()
            await self._one_by_one(step, budget_s)
            while len(shares) < _LEAST_PASSES:
                await step()
        return {"share": statistics.median(shares)}


async def _one_op(x: Tensor, y: Tensor) -> None:
    async with arpc.autograd.context() as ctx_id:
        product = await arpc.rpc_sync(callee_name(0), mul_async, (x, y))
        await arpc.autograd.backward(ctx_id, [product.sum()])
        assert len(arpc.autograd.get_gradients(ctx_id)) == 2
