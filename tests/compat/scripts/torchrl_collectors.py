"""A program for torch.distributed.rpc: TorchRL's RPC collectors, which start processes of their own."""

import os

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors.distributed import RPCCollector
from torchrl.envs import PendulumEnv

from tests.compat.scripts.seeding import seeded

FRAMES, BATCHES, WORKERS = 40, 4, 2


class Flatten(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = seeded(nn.Linear(2, 1), 29)

    def forward(self, angle, speed):
        return torch.tanh(self.layer(torch.stack([angle, speed], -1)))


def make_env(seed):
    return lambda: PendulumEnv(seed=seed)


def collect(**how):
    """What collectors on two further workers bring."""
    policy = TensorDictModule(Flatten(), in_keys=["th", "thdot"], out_keys=["action"])
    collector = RPCCollector(
        [make_env(seed) for seed in range(WORKERS)],
        policy,
        frames_per_batch=FRAMES,
        total_frames=FRAMES * BATCHES,
        launcher="mp",
        tcp_port=os.environ["MASTER_PORT"],
        max_frames_per_traj=20,
        **how,
    )
    batches = []
    for batch in collector:
        batches.append(batch)
        with torch.no_grad():
            policy.module.layer.weight.mul_(0.5)
        collector.update_policy_weights_()
    collector.shutdown()
    return batches


def shapes(batches):
    return [sorted((str(key), list(value.shape)) for key, value in batch.items(True, True)) for batch in batches]


def run(rank, world_size):
    """Both workers fill half of each batch; the rewards and the shapes."""
    if rank:
        return None
    batches = collect(sync=True)
    # which half comes first is not the same each time
    rewards = [batch["next", "reward"].reshape(WORKERS, -1).sum(1).sort().values.tolist() for batch in batches]
    return {"rewards": rewards, "shapes": shapes(batches)}
