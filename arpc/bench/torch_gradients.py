"""The steps of `arpc.bench.arpc_gradients` with torch. They block, so concurrent contexts need threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from torch import Tensor
from torch.distributed import autograd as untyped_autograd
from torch.distributed import rpc

from arpc.bench.asyncio_caller import latency_figures
from arpc.bench.blocking_caller import MINIMUM_WARM_UP_S, BlockingCall, RpcCaller, one_by_one
from arpc.bench.gradients import BLOCKS, CONTEXTS, FAN_OUT, arithmetic_s, leaves, mul, run_block, sequences, total
from arpc.bench.systems import WARM_UP_SHARE, Measurement, callee_name

__all__ = ["TorchGradients"]

autograd = cast("Any", untyped_autograd)  # torch has no types for it


class TorchGradients(RpcCaller):
    """The measurements of autograd."""

    async def autograd_op(self, *, budget_s: float) -> Measurement:
        x, y = leaves()
        return latency_figures(_measured(lambda: _one_op(x, y), budget_s))

    async def autograd_contexts(self, *, budget_s: float) -> Measurement:
        x, y = leaves()
        with ThreadPoolExecutor(CONTEXTS) as threads:

            def step() -> None:
                for done in [threads.submit(_one_op, x, y) for _ in range(CONTEXTS)]:
                    done.result()

            return latency_figures(_measured(step, budget_s))

    async def autograd_transformer(self, *, budget_s: float) -> Measurement:
        def step() -> None:
            with autograd.context() as ctx_id:
                values = sequences()
                for number in range(0, BLOCKS, 2):
                    calls = [
                        rpc.rpc_async(callee_name(0), run_block, (number + 1, run_block(number, value)))
                        for value in values
                    ]
                    values = [cast("Tensor", call.wait()) for call in calls]
                autograd.backward(ctx_id, [total(values)])
                assert autograd.get_gradients(ctx_id)

        figures = latency_figures(_measured(step, budget_s))
        return figures | {"arithmetic": 1e6 * arithmetic_s() / figures["p50_us"]}

    async def autograd_group(self, *, budget_s: float) -> Measurement:
        x, y = leaves()

        def chain() -> None:
            with autograd.context() as ctx_id:
                result = rpc.rpc_sync(callee_name(0), _pass_on, (x, callee_name(1)))
                autograd.backward(ctx_id, [result.sum()])
                assert len(autograd.get_gradients(ctx_id)) == 1

        def fan_out() -> None:
            with autograd.context() as ctx_id:
                calls = [rpc.rpc_async(callee_name(peer), mul, (x, y)) for peer in range(FAN_OUT)]
                results = [call.wait() for call in calls]
                autograd.backward(ctx_id, [cast("Tensor", sum(results)).sum()])
                assert len(autograd.get_gradients(ctx_id)) == 2

        return {
            name: latency_figures(_measured(step, budget_s))["p50_us"]
            for name, step in (("chain_us", chain), ("fan_out_us", fan_out))
        }


def _measured(step: BlockingCall, budget_s: float) -> list[float]:
    one_by_one(step, max(MINIMUM_WARM_UP_S, budget_s * WARM_UP_SHARE))
    return one_by_one(step, budget_s)


def _one_op(x: Tensor, y: Tensor) -> None:
    with autograd.context() as ctx_id:
        product = rpc.rpc_sync(callee_name(0), mul, (x, y))
        autograd.backward(ctx_id, [product.sum()])
        assert len(autograd.get_gradients(ctx_id)) == 2


def _pass_on(x: Tensor, *further: str) -> Tensor:
    return 2 * cast("Tensor", rpc.rpc_sync(further[0], _pass_on, (x, *further[1:]))) if further else 2 * x
