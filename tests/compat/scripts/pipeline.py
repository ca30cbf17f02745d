"""A script for torch.distributed.rpc: a model in two stages on two workers, micro-batches through both at once."""

# ruff: noqa: PLR0402 - as people write them

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

from tests.compat.scripts.seeding import seeded

STEPS = 10


class Stage(nn.Module):
    def __init__(self, seed, inputs, outputs):
        super().__init__()
        self.layer = seeded(nn.Linear(inputs, outputs), seed)

    def forward(self, x_rref):
        return torch.tanh(self.layer(x_rref.to_here()))

    def parameter_rrefs(self):
        return [RRef(parameter) for parameter in self.parameters()]


class Pipeline(nn.Module):
    def __init__(self, split):
        super().__init__()
        self.split = split
        self.first = rpc.remote("worker1", Stage, args=(1, 4, 8))
        self.second = rpc.remote("worker2", Stage, args=(2, 8, 2))

    def forward(self, batch):
        outputs = []
        for part in batch.split(self.split):
            hidden = self.first.remote().forward(RRef(part))
            outputs.append(self.second.rpc_async().forward(hidden))
        return torch.cat(torch.futures.wait_all(outputs))

    def parameter_rrefs(self):
        return self.first.rpc_sync().parameter_rrefs() + self.second.rpc_sync().parameter_rrefs()


def run(rank, world_size):
    """Train a little, on worker 0; the losses."""
    losses = []
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=16, rpc_timeout=300)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == 0:
        model = Pipeline(split=2)
        optimizer = DistributedOptimizer(torch.optim.SGD, model.parameter_rrefs(), lr=0.05)
        torch.manual_seed(3)
        x, y = torch.randn(8, 4), torch.zeros(8, 2)
        for _ in range(STEPS):
            with dist_autograd.context() as context_id:
                loss = nn.functional.mse_loss(model(x), y)
                dist_autograd.backward(context_id, [loss])
                optimizer.step(context_id)
                losses.append(loss.item())
    rpc.shutdown()
    return losses
