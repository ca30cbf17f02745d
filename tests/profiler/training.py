"""A training step over three workers: what a trace is shown with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import arpc


class Stage(nn.Module):
    """A layer that lives on a worker."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, value: Tensor) -> Tensor:
        return torch.relu(self.linear(value))

    def statistics(self) -> Tensor:
        return self.linear.weight.detach().abs().mean()


async def train_step(first: arpc.RRef[Stage], second: arpc.RRef[Stage], batch: Tensor) -> float:
    """Forward through both stages, a backward pass over all workers, and a look at what is there."""
    async with arpc.autograd.context() as context_id:
        halves = [arpc.remote(first.owner(), forward, args=(first, half)) for half in batch.requires_grad_().chunk(2)]
        outputs = [await arpc.rpc_async(second.owner(), forward_both, args=(second, half)) for half in halves]
        loss = torch.cat(outputs).pow(2).mean()
        await arpc.autograd.backward(context_id, [loss])
    weight = await first.remote().statistics()
    return float(loss.item() + weight.item())


async def forward(stage: arpc.RRef[Stage], value: Tensor) -> Tensor:
    module = await stage.local_value()
    result: Tensor = module(value)
    return result


async def forward_both(stage: arpc.RRef[Stage], value: arpc.RRef[Tensor]) -> Tensor:
    """Fetch what the first stage has made, from where it is, and go on with it."""
    module = await stage.local_value()
    result: Tensor = module(await value.to_here())
    return result
