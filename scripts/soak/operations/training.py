"""Distributed autograd: a forward pass over two workers, and the backward pass."""

from __future__ import annotations

import torch

import arpc
from scripts.soak.operations.base import TIMEOUT_S, Client, Operation, here

__all__ = ["OPERATIONS"]


async def scaled(token: str, x: torch.Tensor, factor: float) -> torch.Tensor:
    here().ledger.ran(token)
    return x * factor


async def _train(client: Client) -> None:
    names = client.other(), client.other()
    factors = client.random.uniform(0.5, 2), client.random.uniform(0.5, 2)
    x = torch.rand(64, requires_grad=True)
    async with arpc.autograd.context() as context_id:
        y = x
        for to, factor in zip(names, factors, strict=True):
            async with client.call("train-forward", to, *names) as token:
                y = await client.worker.rpc_sync(to, scaled, args=(token, y, factor), timeout=TIMEOUT_S)
        async with client.call("train-backward", *names):
            await arpc.autograd.backward(context_id, [y.sum()])
        gradient = arpc.autograd.get_gradients(context_id)[x]
    expected = torch.full_like(x, factors[0] * factors[1])
    assert torch.allclose(gradient, expected), "a gradient is wrong"


OPERATIONS = (Operation("train", _train),)
