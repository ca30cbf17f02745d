"""For torch.distributed.rpc: data parallel trainers whose embedding is on a parameter server."""

# ruff: noqa: PLR0402 - as people write them

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn, optim
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef
from torch.nn.parallel import DistributedDataParallel

from tests.compat.scripts.seeding import seeded

STEPS, TRAINERS = 5, (0, 1)


class Table(nn.EmbeddingBag):
    def __init__(self):
        super().__init__(6, 4, mode="sum")
        seeded(self, 13)


class HybridModel(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table = table
        self.linear = DistributedDataParallel(seeded(nn.Linear(4, 1), 11))

    def forward(self, indices, offsets):
        return self.linear(self.table.forward(indices, offsets))


def train(rank):
    """Runs on both trainers, called by the server."""
    table = _tables[0] if _tables else None
    model = HybridModel(table)
    parameters = [*table.remote_parameters(), *(RRef(parameter) for parameter in model.linear.parameters())]
    optimizer = DistributedOptimizer(optim.SGD, parameters, lr=0.01)
    indices, offsets, losses = torch.arange(6), torch.tensor([0, 3]), []
    for _ in range(STEPS):
        with dist_autograd.context() as context_id:
            loss = model(indices, offsets).pow(2).sum()
            dist_autograd.backward(context_id, [loss])
            dist.barrier()  # both have read the table before either changes it
            optimizer.step(context_id)
            losses.append(loss.item())
        dist.barrier()
    return losses, model.linear.module.weight.flatten().tolist()


_tables = []


def set_table(table):
    _tables[:] = [table]


def run(rank, world_size):
    """Trainers 0 and 1, and the server with the table; the losses of the first, and the weights of both."""
    results = None
    if rank in TRAINERS:
        dist.init_process_group("gloo", rank=rank, world_size=len(TRAINERS))
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    if rank not in TRAINERS:
        table = RemoteModule(f"worker{rank}", Table)
        for trainer in TRAINERS:
            rpc.rpc_sync(f"worker{trainer}", set_table, args=(table,))
        futures = [rpc.rpc_async(f"worker{trainer}", train, args=(trainer,)) for trainer in TRAINERS]
        (losses, weight), (_, other) = torch.futures.wait_all(futures)
        results = {"losses": losses, "weights": [weight, other]}
    rpc.shutdown()
    _tables.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    return results
