"""A program for torch.distributed.rpc: TorchRL's remote replay buffer, with collectors that fill it and a trainer."""

# ruff: noqa: PLR0402 - as people write them

import torch
import torch.distributed.rpc as rpc
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, RemoteTensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler, SamplerWithoutReplacement
from torchrl.data.replay_buffers.writers import RoundRobinWriter

ROUNDS, BATCH = 5, 16


def collect(buffer, number):
    """Runs on a collector: adds batches to the buffer of another worker."""
    for turn in range(ROUNDS):
        start = float(1000 * number + 100 * turn)
        observation = (start + torch.arange(BATCH)).unsqueeze(1)
        data = TensorDict({"observation": observation, "next": {"reward": observation * 0.5}}, [BATCH])
        rpc.rpc_sync(buffer.owner(), RemoteTensorDictReplayBuffer.extend, args=(buffer, data))
    buffer.rpc_sync().add(TensorDict({"observation": torch.ones(1), "next": {"reward": torch.ones(1)}}, []))
    return buffer.rpc_sync().__len__()


def make(storage, sampler):
    # the order of what is drawn is not the subject
    return rpc.remote(
        "worker1",
        RemoteTensorDictReplayBuffer,
        kwargs={"storage": storage, "sampler": sampler, "writer": RoundRobinWriter(), "batch_size": 2 * BATCH},
    )


def whole(buffer, size):
    """All that is in a buffer, in order of its values."""
    samples = [rpc.rpc_sync(buffer.owner(), RemoteTensorDictReplayBuffer.sample, args=(buffer,)) for _ in range(size)]
    values = torch.cat([sample["observation"] for sample in samples]).flatten().sort().values
    return [values.sum().item(), *values[::20].tolist()]


def drive():
    results = {}
    size = 2 * ROUNDS * BATCH
    for name, storage in (("tensors", LazyTensorStorage(size)), ("files", LazyMemmapStorage(size))):
        buffer = make(storage, SamplerWithoutReplacement())
        lengths = [rpc.rpc_sync(f"worker{n}", collect, args=(buffer, n)) for n in (1, 2)]
        results[name] = [lengths, *whole(buffer, size // (2 * BATCH))]
    buffer = make(LazyTensorStorage(size), RandomSampler())
    rpc.rpc_sync("worker2", collect, args=(buffer, 2))
    sample, info = buffer.rpc_sync().sample(return_info=True)
    results["keys"] = [sorted(str(key) for key in sample.keys(include_nested=True)), list(sample.batch_size)]
    results["information"] = sorted(str(key) for key in info)
    return results


def run(rank, world_size):
    """A trainer on worker 0, the buffer on worker 1, collectors on 1 and 2; what the buffers held."""
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    results = None if rank else drive()
    rpc.shutdown()
    return results
