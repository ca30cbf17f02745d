"""A script for torch.distributed.rpc: trainers fetch a model, send gradients, and the server updates in batches."""

# ruff: noqa: PLR0402, T201 - as people write them

import sys

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.optim import DistributedOptimizer


class ParameterServer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 1, bias=False)

    def forward(self, x):
        return self.linear(x)

    def parameter_rrefs(self):
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def weight_norm(self):
        return self.linear.weight.norm().item()


class Trainer(nn.Module):
    def __init__(self):
        super().__init__()
        self.server = rpc.remote("ps", ParameterServer)

    def forward(self, x):
        return self.server.rpc_sync().forward(x)


def train(rank, world_size):
    rpc.init_rpc(f"trainer{rank}" if rank else "ps", rank=rank, world_size=world_size)
    if rank == 1:
        trainer = Trainer()
        optimizer = DistributedOptimizer(torch.optim.SGD, trainer.server.rpc_sync().parameter_rrefs(), lr=0.1)
        x, losses = torch.ones(8, 4), []
        for _ in range(5):
            with dist_autograd.context() as context_id:
                loss = (trainer(x) - 1).pow(2).mean()
                dist_autograd.backward(context_id, [loss])
                optimizer.step(context_id)
                losses.append(loss.item())
        assert losses[-1] < losses[0] / 10, losses
        print(f"trained, {trainer.server.rpc_sync().weight_norm():.3f}", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    import os

    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", sys.argv[1]
    mp.spawn(train, args=(2,), nprocs=2, join=True)
