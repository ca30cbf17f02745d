"""A program for torch.distributed.rpc: gradients of several trainers, gathered by an async_execution function."""

# ruff: noqa: PLR0402, T201 - as people write them

import os
import threading

import torch
import torch.distributed.rpc as rpc

STEPS, TRAINERS = 20, 2


class BatchServer:
    def __init__(self):
        self.model = torch.zeros(3)
        self.lock = threading.Lock()
        self.future = torch.futures.Future()
        self.updates = []

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch(server_rref, gradient):
        self = server_rref.local_value()
        with self.lock:
            self.updates.append(gradient)
            future = self.future
            if len(self.updates) == TRAINERS:
                self.model = self.model - torch.stack(self.updates).mean(0)
                self.updates = []
                self.future = torch.futures.Future()
                future.set_result(self.model)
        return future


def run_trainer(server_rref, number):
    for _ in range(STEPS):
        model = rpc.rpc_sync(
            server_rref.owner(), BatchServer.update_and_fetch, args=(server_rref, torch.full((3,), float(number)))
        )
    return model


def run(rank, world_size):
    """Trainers on the last workers, the server on worker 0; the model that each trainer has at the end."""
    models = []
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        server = rpc.RRef(BatchServer())
        trainers = range(world_size - TRAINERS, world_size)
        calls = [rpc.rpc_async(f"worker{n}", run_trainer, args=(server, n + 1)) for n in trainers]
        models = [model.tolist() for model in torch.futures.wait_all(calls)]
    rpc.shutdown()
    return models


if __name__ == "__main__":
    trained = run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    if trained:
        print(f"gathered {trained}", flush=True)
