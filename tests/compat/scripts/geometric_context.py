"""A program for torch.distributed.rpc: the distributed context of PyTorch Geometric, with its router and its calls."""

import os

import torch
from torch_geometric.distributed.dist_context import DistContext, DistRole
from torch_geometric.distributed.rpc import (
    RPCCallBase,
    RPCRouter,
    global_all_gather,
    global_barrier,
    init_rpc,
    rpc_async,
    rpc_is_initialized,
    rpc_partition_to_workers,
    rpc_register,
    rpc_sync,
    shutdown_rpc,
)

CALLS = 50


class Square(RPCCallBase):
    def rpc_sync(self, x):
        return x * x

    def rpc_async(self, x):
        return x * x + 1


def run(rank, world_size):
    """Every worker calls every other; what each of them got."""
    context = DistContext(
        world_size=world_size,
        rank=rank,
        global_world_size=world_size,
        global_rank=rank,
        group_name="geometric",
        role=DistRole.WORKER,
    )
    before = rpc_is_initialized()
    for _ in range(2):  # the second time has no effect
        init_rpc(context, "localhost", int(os.environ["MASTER_PORT"]), num_rpc_threads=4, rpc_timeout=60)
    gathered = global_all_gather(torch.full((2,), float(rank)), timeout=60)
    partitions = rpc_partition_to_workers(context, world_size, rank)
    router, call_id = RPCRouter(partitions), rpc_register(Square())
    global_barrier(timeout=60)
    names = [router.get_to_worker((rank + shift) % world_size) for shift in range(world_size)]
    sums = [rpc_sync(name, call_id, args=(torch.arange(4),)).sum().item() for name in names]
    futures = [rpc_async(names[n % world_size], call_id, args=(torch.full((2,), n),)) for n in range(CALLS)]
    total = sum(future.wait().sum().item() for future in futures)
    global_barrier(timeout=60)
    during = rpc_is_initialized()
    shutdown_rpc(f"worker {rank}", graceful=True)
    return {
        "gathered": {name: value.tolist() for name, value in sorted(gathered.items())},
        "partitions": partitions,
        "names": names,
        "sums": sums,
        "total": total,
        "initialized": [before, during, rpc_is_initialized()],
    }
