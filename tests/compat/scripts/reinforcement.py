"""A program for torch.distributed.rpc: observers that run episodes, and an agent that acts for them and learns."""

# ruff: noqa: PLR0402 - as people write them

import torch
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.rpc import RRef, remote, rpc_async, rpc_sync

from tests.compat.scripts.seeding import seeded

EPISODES, STEPS = 3, 10


def _call_method(method, rref, *args, **kwargs):
    return method(rref.local_value(), *args, **kwargs)


def _remote_method(method, rref, *args, **kwargs):
    return rpc_sync(rref.owner(), _call_method, args=[method, rref, *args], kwargs=kwargs)


class Observer:
    """A point that is to be pushed back to where it began."""

    def __init__(self):
        self.id = rpc.get_worker_info().id

    def run_episode(self, agent_rref):
        position = torch.tensor([1.0, float(self.id)])
        for _ in range(STEPS):
            action = _remote_method(Agent.select_action, agent_rref, self.id, position)
            position = position + (0.1 if action else -0.1)
            _remote_method(Agent.report_reward, agent_rref, self.id, -position.abs().sum().item())


class Agent:
    def __init__(self, observers):
        self.agent_rref = RRef(self)
        self.policy = seeded(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2), nn.Softmax(dim=-1)), 17)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.01)
        self.observer_rrefs = [remote(rpc.get_worker_info(name), Observer) for name in observers]
        # Observers ask at the same time: each has its own generator, so that actions do not depend on the order.
        ids = [rref.owner().id for rref in self.observer_rrefs]
        self.generators = {each: torch.Generator().manual_seed(each) for each in ids}
        self.rewards = {each: [] for each in ids}
        self.log_probabilities = {each: [] for each in ids}

    def select_action(self, observer, position):
        probabilities = self.policy(position)
        action = torch.multinomial(probabilities, 1, generator=self.generators[observer]).item()
        self.log_probabilities[observer].append(probabilities[action].log())
        return action

    def report_reward(self, observer, reward):
        self.rewards[observer].append(reward)

    def run_episode(self):
        futures = [
            rpc_async(rref.owner(), _call_method, args=(Observer.run_episode, rref, self.agent_rref))
            for rref in self.observer_rrefs
        ]
        for future in futures:
            future.wait()

    def learn(self):
        total = sum(sum(rewards) for rewards in self.rewards.values())
        for each, rewards in self.rewards.items():
            returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
            (-torch.stack(self.log_probabilities[each]) * returns).sum().backward()
            self.rewards[each], self.log_probabilities[each] = [], []
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def run(rank, world_size):
    """Episodes of each observer, for the agent on worker 0; the rewards."""
    rewards = []
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        agent = Agent([f"worker{number}" for number in range(1, world_size)])
        for _ in range(EPISODES):
            agent.run_episode()
            rewards.append(agent.learn())
    rpc.shutdown()
    return rewards
