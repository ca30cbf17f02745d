"""A program for torch.distributed.rpc: trainers whose whole model is on a parameter server."""

# ruff: noqa: PLR0402, T201 - as people write them

import os
import sys

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.optim import DistributedOptimizer

from tests.compat.scripts.seeding import seeded

STEPS = 5


class ParameterServer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = seeded(nn.Linear(4, 1, bias=False), 0)

    def forward(self, x):
        return self.linear(x)

    def parameter_rrefs(self):
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def weight_norm(self):
        return self.linear.weight.norm().item()


class Trainer(nn.Module):
    def __init__(self):
        super().__init__()
        self.server = rpc.remote("worker0", ParameterServer)

    def forward(self, x):
        return self.server.rpc_sync().forward(x)


def train():
    trainer, losses = Trainer(), []
    optimizer = DistributedOptimizer(torch.optim.SGD, trainer.server.rpc_sync().parameter_rrefs(), lr=0.1)
    x = torch.ones(8, 4)
    for _ in range(STEPS):
        with dist_autograd.context() as context_id:
            loss = (trainer(x) - 1).pow(2).mean()
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
            losses.append(loss.item())
    return losses, trainer.server.rpc_sync().weight_norm()


def run(rank, world_size):
    """The server on worker 0; every other worker trains a model of its own there. Its losses and its norm."""
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    results = train() if rank else None
    rpc.shutdown()
    return results


def run_and_tell(rank, world_size):
    results = run(rank, world_size)
    if results:
        print(f"trained, {results[1]:.3f}", flush=True)


if __name__ == "__main__":
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", sys.argv[1]
    mp.spawn(run_and_tell, args=(2,), nprocs=2, join=True)
