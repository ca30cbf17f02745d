"""A program for torch.distributed.rpc: tensordicts of every kind as arguments, results, remote values and gradients."""

# ruff: noqa: PLR0402 - as people write them

import tempfile

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, tensorclass
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributed.optim import DistributedOptimizer

from tests.compat.scripts.seeding import seeded

STEPS = 10


@tensorclass
class Sample:
    position: torch.Tensor
    label: str


def describe(value):
    """What arrived, in words and numbers."""
    if isinstance(value, LazyStackedTensorDict):
        return [type(value).__name__, *(describe(each) for each in value.tensordicts)]
    leaves = sorted(value.keys(include_nested=True, leaves_only=True), key=str)
    sums = [value.get(leaf).sum().item() for leaf in leaves if isinstance(value.get(leaf), torch.Tensor)]
    return [type(value).__name__, list(value.batch_size), [str(leaf) for leaf in leaves], sums]


def echo(value):
    return value


def twice(value):
    return value.apply(lambda leaf: leaf * 2)


class Store:
    """Keeps a tensordict for others to read and to write."""

    def __init__(self, data):
        self.data = data

    def update(self, more):
        self.data.update_(more)
        return self.data.is_locked

    def part(self, index):
        return self.data[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        first = TensorDictModule(nn.Linear(3, 4), in_keys=["x"], out_keys=["hidden"])
        second = TensorDictModule(nn.Linear(4, 1), in_keys=["hidden"], out_keys=["y"])
        self.net = seeded(TensorDictSequential(first, second), 23)

    def forward(self, data):
        return self.net(data)

    def parameter_rrefs(self):
        return [rpc.RRef(parameter) for parameter in self.parameters()]


def kinds(folder):
    nested = TensorDict({"a": torch.arange(6.0).view(2, 3), "b": {"c": torch.ones(2, dtype=torch.long)}}, [2])
    return {
        "nested": nested,
        "locked": nested.clone().lock_(),
        "large": TensorDict({"a": torch.arange(200_000.0).view(2, -1)}, [2]),
        "lazy": LazyStackedTensorDict(TensorDict({"a": torch.ones(2)}, []), TensorDict({"a": torch.ones(3)}, [])),
        "words": TensorDict({"a": torch.ones(1), "text": NonTensorData("hello", batch_size=[])}, []),
        "mapped": nested.memmap(folder),
    }


def train():
    net, losses = rpc.remote("worker2", Net), []
    optimizer = DistributedOptimizer(torch.optim.SGD, net.rpc_sync().parameter_rrefs(), lr=0.1)
    for _ in range(STEPS):
        with dist_autograd.context() as context_id:
            data = TensorDict({"x": torch.ones(5, 3)}, [5])
            loss = (net.rpc_sync().forward(data)["y"] - 1).pow(2).mean()
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
            losses.append(loss.item())
    return losses


def drive():
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, value in kinds(folder).items():
            results[name] = rpc.rpc_sync("worker1", describe, args=(value,))
    plain = TensorDict({"a": torch.ones(2, 3)}, [2, 3], names=["row", "column"])
    results["twice"] = describe(rpc.rpc_async("worker1", twice, args=(plain,)).wait())
    results["names"] = rpc.rpc_sync("worker1", TensorDict.clone, args=(plain,)).names
    sample = rpc.rpc_sync("worker1", echo, args=(Sample(torch.ones(2, 3), label="here", batch_size=[2]),))
    results["class"] = [sample.label, sample.position.sum().item(), list(sample.batch_size)]
    store = rpc.remote("worker1", Store, args=(TensorDict({"a": torch.zeros(4)}, [4]),))
    results["locked"] = store.rpc_sync().update(TensorDict({"a": torch.arange(4.0)}, [4]))
    results["part"] = describe(store.rpc_sync().part(slice(1, 3)))
    results["remote part"] = describe(store.remote().part(torch.tensor([0, 3])).to_here())
    results["losses"] = train()
    return results


def run(rank, world_size):
    """Worker 0 sends, the others hold and compute; what arrived."""
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    results = None if rank else drive()
    rpc.shutdown()
    return results
