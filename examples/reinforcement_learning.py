"""Reinforcement learning with many actors and one learner: a cart learns to balance a pole.

    arpc launch --role learner=1,actor=3 examples/reinforcement_learning.py

Every actor plays a batch of games with the policy that it receives, and returns its observations. The learner keeps one
call to each actor in flight: it learns from the first that ends, and that actor continues with the newest policy while
the others still play. No actor waits for the slowest.

The environment is gymnasium's CartPole-v1 if that package is installed. Else, or with --environment own, it is the same
cart and pole, with the same rules, written in torch below.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import math
import time
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import arpc

LEARNER = "learner0"  # the launcher numbers the workers of each role
LONGEST = 200  # steps of a game
MOVES = 2  # to push the cart to the left, or to the right


def make_policy() -> nn.Sequential:
    """Make the policy: from the place and speed of the cart and the angle and speed of the pole to move scores."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, MOVES))


# -- the environment --------------------------------------------------------------------------------------------------


class Environment(Protocol):
    """Many games side by side."""

    def look(self) -> Tensor:
        """Return the observations of all games."""

    def move(self, moves: Tensor) -> Tensor:
        """Advance all games by one step; return which of them are over."""


class OwnCartPole:
    """A pole on a cart that is pushed to the left or to the right, as Barto, Sutton and Anderson described it."""

    def __init__(self, games: int, seed: int) -> None:
        dice = torch.Generator().manual_seed(seed)
        self.state = torch.rand(games, 4, generator=dice) * 0.1 - 0.05

    def look(self) -> Tensor:
        return self.state

    def move(self, moves: Tensor) -> Tensor:
        place, speed, angle, turning = self.state.unbind(dim=1)
        force = 20.0 * moves - 10.0
        push = (force + 0.05 * turning**2 * angle.sin()) / 1.1
        turn = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        accelerate = push - 0.05 * turn * angle.cos() / 1.1
        step_s = 0.02
        self.state = torch.stack(
            (place + step_s * speed, speed + step_s * accelerate, angle + step_s * turning, turning + step_s * turn),
            dim=1,
        )
        return (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 12 * math.pi / 180)


class GymnasiumCartPole:
    """CartPole-v1 of the package gymnasium."""

    def __init__(self, games: int, seed: int) -> None:
        import gymnasium

        self._games = gymnasium.make_vec("CartPole-v1", num_envs=games, vectorization_mode="sync")
        self._seen, _ = self._games.reset(seed=seed)

    def look(self) -> Tensor:
        return torch.as_tensor(self._seen).float()

    def move(self, moves: Tensor) -> Tensor:
        self._seen, _, is_fallen, _, _ = self._games.step(moves.numpy())
        return torch.as_tensor(is_fallen)


ENVIRONMENTS: dict[str, type[OwnCartPole | GymnasiumCartPole]] = {
    "own": OwnCartPole,
    "gymnasium": GymnasiumCartPole,
}


# -- the actors -------------------------------------------------------------------------------------------------------


class Games(NamedTuple):
    """The observations, moves and log-probabilities of an actor, step by step, and which games still went on."""

    seen: Tensor
    moves: Tensor
    log_chances: Tensor
    is_alive: Tensor


@torch.no_grad()
def play(environment: str, weights: Tensor, games: int, seed: int) -> Games:
    """Play a batch of games. A plain function, so it runs in a thread, and the actor's loop stays free."""
    policy, dice = make_policy(), torch.Generator().manual_seed(seed)
    vector_to_parameters(weights, policy.parameters())
    world: Environment = ENVIRONMENTS[environment](games, seed)
    steps: list[tuple[Tensor, ...]] = []
    is_alive = torch.ones(games, dtype=torch.bool)
    while is_alive.any() and len(steps) < LONGEST:
        seen = world.look()
        scores = policy(seen).log_softmax(dim=1)
        move = torch.multinomial(scores.exp(), 1, generator=dice)
        steps.append((seen, move[:, 0], scores.gather(1, move)[:, 0], is_alive))
        is_alive = is_alive & ~world.move(move[:, 0])
    return Games(*(torch.stack(part) for part in zip(*steps, strict=True)))


# -- the learner ------------------------------------------------------------------------------------------------------


class Learner:
    """The policy, and its updates."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.policy = make_policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.02)

    @property
    def weights(self) -> Tensor:
        """A copy of the parameters to send: a tensor must not change while it is being sent."""
        return parameters_to_vector(self.policy.parameters()).detach().clone()

    def learn(self, games: Games) -> float:
        """Make moves after which the pole stayed up longer than usual more likely. Return the mean length of games."""
        alive = games.is_alive.float()
        left = alive.flip(0).cumsum(0).flip(0)  # the number of steps that each game still lasted
        usual = (left * alive).sum(dim=1, keepdim=True) / alive.sum(dim=1, keepdim=True).clamp(min=1)
        advantage = (left - usual) / left.std()
        scores = self.policy(games.seen).log_softmax(dim=2)
        # the actor played with an older policy: weigh its moves by their present probability, within bounds
        ratio = (scores.gather(2, games.moves[..., None])[..., 0] - games.log_chances).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        loss = -(gain * alive).sum() / alive.sum()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return alive.sum(dim=0).mean().item()


async def learn(actors: list[str], environment: str, updates: int, games: int) -> list[float]:
    """Let the actors play until the policy has had `updates` updates; return the mean length of games at each."""
    learner, lengths = Learner(), list[float]()
    playing: dict[asyncio.Future[Games], str] = {}
    seeds = iter(range(updates + len(actors)))

    def start(actor: str) -> None:
        playing[arpc.rpc_async(actor, play, (environment, learner.weights, games, next(seeds)))] = actor

    try:
        for actor in actors:
            start(actor)
        while len(lengths) < updates:
            ended, _ = await asyncio.wait(playing, return_when=asyncio.FIRST_COMPLETED)
            for one in ended:
                actor = playing.pop(one)
                lengths.append(learner.learn(one.result()))
                if len(lengths) % max(1, updates // 10) == 0:
                    print(f"{len(lengths):5} updates   {actor} balanced for {lengths[-1]:5.0f} steps", flush=True)
                if len(lengths) + len(playing) < updates:
                    start(actor)
    finally:
        for one in playing:
            one.cancel()  # on the actor, too
    return lengths


def draw(lengths: list[float], environment: str, path: Path) -> None:
    """Draw the progress of the training."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    axes.plot(lengths)
    axes.set(
        title=f"A pole on a cart, balanced by many actors and one learner ({environment})",
        xlabel="updates of the policy",
        ylabel=f"steps until it falls, {LONGEST} at most",
        ylim=(0, 1.05 * LONGEST),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


async def main(arguments: argparse.Namespace) -> None:
    """Run one process: actors serve the learner, until it leaves."""
    async with arpc.init_rpc() as worker:  # name, rank, secret and meeting place are in the environment
        if worker.name != LEARNER:
            return  # leaving the block waits for the whole group, and serves calls meanwhile
        actors = [peer.name for peer in worker.get_worker_infos() if peer.name != LEARNER]
        environment = arguments.environment
        print(f"the environment is {'CartPole-v1 of gymnasium' if environment == 'gymnasium' else 'our own cart-pole'}")
        started = time.perf_counter()
        lengths = await learn(actors, environment, arguments.updates, arguments.games)
        seconds = time.perf_counter() - started
    rate = sum(lengths) * arguments.games / seconds
    last = sum(lengths[-5:]) / len(lengths[-5:])
    print(
        f"balanced for {lengths[0]:.0f} -> {last:.0f} of {LONGEST} steps; {rate:,.0f} steps/s by {len(actors)} actors"
    )
    if arguments.plot:
        draw(lengths, environment, arguments.plot)
        print(f"the picture is {arguments.plot}")


if __name__ == "__main__":
    usual = "gymnasium" if importlib.util.find_spec("gymnasium") else "own"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=100, help="how often the policy is improved (100)")
    parser.add_argument("--games", type=int, default=32, help="how many games an actor plays at once (32)")
    parser.add_argument("--environment", choices=ENVIRONMENTS, default=usual, help=f"whose cart-pole it is ({usual})")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw how it went, such as build/rl.png")
    torch.set_num_threads(1)
    arpc.run(main(parser.parse_args()))
