"""A script for torch.distributed.rpc: trainers under torchrun, gradients gathered by an async_execution function."""

# ruff: noqa: PLR0402, T201 - as people write them

import os
import threading

import torch
import torch.distributed.rpc as rpc

TRAINERS = 2


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
    for _ in range(3):
        model = rpc.rpc_sync(
            server_rref.owner(), BatchServer.update_and_fetch, args=(server_rref, torch.full((3,), float(number)))
        )
    return model


def main():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        server = rpc.RRef(BatchServer())
        calls = [rpc.rpc_async(f"worker{n}", run_trainer, args=(server, n + 1)) for n in range(TRAINERS)]
        models = torch.futures.wait_all(calls)
        assert all(torch.equal(model, torch.full((3,), -4.5)) for model in models), models
        print("gathered", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    main()
