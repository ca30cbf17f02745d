"""Several scripts of torch.distributed.rpc, one after the other, in the same three processes."""

import os
import sys

import torch.multiprocessing as mp

from tests.compat.scripts import ddp_rpc, pipeline, reinforcement, rnn


def run_all(rank, world_size, ports):
    for script, port in zip((pipeline, rnn, reinforcement, ddp_rpc), ports, strict=True):
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", port
        script.run(rank, world_size)


if __name__ == "__main__":
    mp.spawn(run_all, args=(3, sys.argv[1:]), nprocs=3, join=True)
