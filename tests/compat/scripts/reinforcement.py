"""For torch.distributed.rpc: observers that run episodes and report to the agent that called them."""

# ruff: noqa: PLR0402, T201 - as people write them

import torch
import torch.distributed.rpc as rpc
from torch.distributed.rpc import RRef, remote, rpc_async, rpc_sync

STEPS = 5


def _call_method(method, rref, *args, **kwargs):
    return method(rref.local_value(), *args, **kwargs)


def _remote_method(method, rref, *args, **kwargs):
    return rpc_sync(rref.owner(), _call_method, args=[method, rref, *args], kwargs=kwargs)


class Observer:
    def __init__(self):
        self.id = rpc.get_worker_info().id

    def run_episode(self, agent_rref):
        state = torch.zeros(4)
        for _ in range(STEPS):
            action = _remote_method(Agent.select_action, agent_rref, self.id, state)
            state = state + action
            _remote_method(Agent.report_reward, agent_rref, self.id, float(state.sum()))


class Agent:
    def __init__(self, observers):
        self.agent_rref = RRef(self)
        self.observer_rrefs = [remote(rpc.get_worker_info(name), Observer) for name in observers]
        self.rewards = {rref.owner().id: [] for rref in self.observer_rrefs}

    def select_action(self, observer, state):
        return torch.full_like(state, float(observer))

    def report_reward(self, observer, reward):
        self.rewards[observer].append(reward)

    def run_episode(self):
        futures = [
            rpc_async(rref.owner(), _call_method, args=(Observer.run_episode, rref, self.agent_rref))
            for rref in self.observer_rrefs
        ]
        for future in futures:
            future.wait()


def run(rank, world_size):
    """One episode of each observer, for the agent on worker 0."""
    rpc.init_rpc("agent" if rank == 0 else f"observer{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        agent = Agent([f"observer{number}" for number in range(1, world_size)])
        agent.run_episode()
        expected = {n: [4.0 * n * step for step in range(1, STEPS + 1)] for n in range(1, world_size)}
        assert agent.rewards == expected, agent.rewards
        print("rewarded", flush=True)
    rpc.shutdown()
