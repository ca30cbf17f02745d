"""For torch.distributed.rpc: a language model whose embedding and decoder are on a parameter server."""

# ruff: noqa: PLR0402 - as people write them

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

from tests.compat.scripts.seeding import seeded

STEPS, TOKENS = 10, 6


def _call_method(method, rref, *args, **kwargs):
    return method(rref.local_value(), *args, **kwargs)


def _remote_method(method, rref, *args, **kwargs):
    return rpc.rpc_sync(rref.owner(), _call_method, args=[method, rref, *args], kwargs=kwargs)


def _parameter_rrefs(module):
    return [RRef(parameter) for parameter in module.parameters()]


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = seeded(nn.Embedding(TOKENS, 4), 5)

    def forward(self, tokens):
        return self.encoder(tokens)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = seeded(nn.Linear(8, TOKENS), 6)

    def forward(self, hidden):
        return self.decoder(hidden)


class RNNModel(nn.Module):
    def __init__(self, server):
        super().__init__()
        self.table = rpc.remote(server, Table)
        self.rnn = seeded(nn.LSTM(4, 8), 7)
        self.decoder = rpc.remote(server, Decoder)

    def forward(self, tokens, hidden):
        embedded = _remote_method(Table.forward, self.table, tokens)
        output, hidden = self.rnn(embedded, hidden)
        return _remote_method(Decoder.forward, self.decoder, output), hidden

    def parameter_rrefs(self):
        remote = [_remote_method(_parameter_rrefs, rref) for rref in (self.table, self.decoder)]
        return [*remote[0], *_parameter_rrefs(self.rnn), *remote[1]]


def run(rank, world_size):
    """Train a little, on worker 0; the losses."""
    losses = []
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        model = RNNModel("worker1")
        optimizer = DistributedOptimizer(optim.SGD, model.parameter_rrefs(), lr=0.5)
        tokens = torch.arange(TOKENS).repeat(2).view(-1, 1)
        criterion = nn.CrossEntropyLoss()
        for _ in range(STEPS):
            with dist_autograd.context() as context_id:
                output, _ = model(tokens[:-1], (torch.zeros(1, 1, 8), torch.zeros(1, 1, 8)))
                loss = criterion(output.squeeze(1), tokens[1:].squeeze(1))
                dist_autograd.backward(context_id, [loss])
                optimizer.step(context_id)
                losses.append(loss.item())
    rpc.shutdown()
    return losses
