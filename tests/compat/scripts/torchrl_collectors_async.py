"""A program for torch.distributed.rpc: TorchRL's RPC collectors, whose batches are taken as they come."""

from tests.compat.scripts.torchrl_collectors import collect, shapes


def run(rank, world_size):
    """Each batch is of one worker, and which one is not the same each time; the shapes."""
    return None if rank else shapes(collect(sync=False))
