"""Reinforcement learning with many actors and one learner: a paddle learns to catch what falls.

    arpc launch --role learner=1,actor=3 examples/reinforcement_learning.py

Every actor plays a batch of games with the policy it was sent, and returns what it saw. The learner keeps one call to
each actor under way: whichever ends first is learnt from, and that actor goes on with the newest policy while others
still play. Nobody waits for the slowest.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import arpc

LEARNER = "learner0"  # the launcher numbers the workers of each role
HEIGHT, WIDTH = 8, 7
MOVES = 3  # left, stay, right


def make_policy() -> nn.Sequential:
    """From where ball and paddle are to a score for each move."""
    return nn.Sequential(nn.Linear(HEIGHT + 2 * WIDTH + 3, 64), nn.Tanh(), nn.Linear(64, MOVES))


class Catch:
    """Many games side by side: a ball falls through a grid, and the paddle on the ground is to be below it."""

    def __init__(self, games: int, dice: torch.Generator) -> None:
        self.row = 0
        self.ball = torch.randint(WIDTH, (games,), generator=dice)
        self.drift = torch.randint(-1, 2, (games,), generator=dice)
        self.paddle = torch.full((games,), WIDTH // 2)

    def look(self) -> Tensor:
        """What a player sees: a one for the ball's row, its column, where it drifts, and the paddle's column."""
        row = torch.zeros(len(self.ball), HEIGHT)
        row[:, self.row] = 1
        columns = nn.functional.one_hot(torch.cat((self.ball, self.paddle)), WIDTH).float().chunk(2)
        drift = nn.functional.one_hot(self.drift + 1, 3).float()
        return torch.cat((row, drift, *columns), dim=1)

    def move(self, moves: Tensor) -> None:
        """One step of time."""
        self.row += 1
        self.ball = (self.ball + self.drift).clamp(0, WIDTH - 1)
        self.paddle = (self.paddle + moves - 1).clamp(0, WIDTH - 1)

    @property
    def caught(self) -> Tensor:
        """At the end: 1 for each game that was won, -1 for each that was lost."""
        return (self.ball == self.paddle).float() * 2 - 1


# -- the actors -------------------------------------------------------------------------------------------------------


class Games(NamedTuple):
    """What an actor saw and did, step by step, how likely that was, and how each game ended."""

    seen: Tensor
    moves: Tensor
    log_chances: Tensor
    rewards: Tensor


@torch.no_grad()
def play(weights: Tensor, games: int, seed: int) -> Games:
    """Play a batch of games. A plain function: it runs in a thread of the actor, whose loop goes on serving."""
    policy, dice = make_policy(), torch.Generator().manual_seed(seed)
    vector_to_parameters(weights, policy.parameters())
    catch = Catch(games, dice)
    seen: list[Tensor] = []
    moves: list[Tensor] = []
    log_chances: list[Tensor] = []
    for _ in range(HEIGHT - 1):
        seen.append(catch.look())
        scores = policy(seen[-1]).log_softmax(dim=1)
        move = torch.multinomial(scores.exp(), 1, generator=dice)
        moves.append(move[:, 0])
        log_chances.append(scores.gather(1, move)[:, 0])
        catch.move(moves[-1])
    return Games(torch.stack(seen), torch.stack(moves), torch.stack(log_chances), catch.caught)


# -- the learner ------------------------------------------------------------------------------------------------------


class Learner:
    """The policy, and how it gets better."""

    def __init__(self) -> None:
        self.policy = make_policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.01)
        self.baseline = 0.0

    @property
    def weights(self) -> Tensor:
        """A copy to send: what is sent must not change while it is on its way."""
        return parameters_to_vector(self.policy.parameters()).detach().clone()

    def learn(self, games: Games) -> float:
        """Make moves of games that went better than usual more likely; the share of games that were won."""
        reward = games.rewards.mean().item()
        scores = self.policy(games.seen).log_softmax(dim=2)
        entropy = -(scores.exp() * scores).sum(dim=2).mean()
        advantage = games.rewards - self.baseline
        # the actor played with a policy that is some updates old: weigh by how likely its moves are now, within bounds
        ratio = (scores.gather(2, games.moves[..., None])[..., 0] - games.log_chances).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        loss = -gain.mean() - 0.05 * entropy
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.baseline += 0.1 * (reward - self.baseline)
        return (reward + 1) / 2


async def learn(actors: list[str], updates: int, games: int) -> list[float]:
    """Let the actors play until the policy was improved so many times; how well it did each time."""
    learner, won = Learner(), list[float]()
    playing: dict[asyncio.Future[Games], str] = {}
    seeds = iter(range(updates + len(actors)))
    try:
        for actor in actors:
            playing[arpc.rpc_async(actor, play, (learner.weights, games, next(seeds)))] = actor
        while len(won) < updates:
            ended, _ = await asyncio.wait(playing, return_when=asyncio.FIRST_COMPLETED)
            for one in ended:
                actor = playing.pop(one)
                won.append(learner.learn(one.result()))
                if len(won) % max(1, updates // 10) == 0:
                    print(f"{len(won):5} updates   {won[-1]:6.1%} of the games of {actor} won", flush=True)
                if len(won) + len(playing) < updates:
                    playing[arpc.rpc_async(actor, play, (learner.weights, games, next(seeds)))] = actor
    finally:
        for one in playing:
            one.cancel()  # over there, too
    return won


def draw(won: list[float], path: str) -> None:
    """A picture of how it went."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    axes.plot(won)
    axes.set(xlabel="updates of the policy", ylabel="share of games won", ylim=(0, 1))
    figure.savefig(path)


async def main(arguments: argparse.Namespace) -> None:
    """The life of each process: actors do what the learner asks for, until it leaves."""
    async with arpc.init_rpc() as worker:  # name, rank, secret and where to meet are in the environment
        if worker.name != LEARNER:
            return  # leaving the block waits for the whole group, and serves it meanwhile
        actors = [peer.name for peer in worker.get_worker_infos() if peer.name != LEARNER]
        started = time.perf_counter()
        won = await learn(actors, arguments.updates, arguments.games)
        seconds = time.perf_counter() - started
    steps = len(won) * arguments.games * (HEIGHT - 1)
    print(f"won {won[0]:.1%} -> {won[-1]:.1%} of the games; {steps / seconds:,.0f} steps/s by {len(actors)} actors")
    if arguments.plot:
        draw(won, arguments.plot)
        print(f"the picture is {arguments.plot}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=200, help="how often the policy is improved (200)")
    parser.add_argument("--games", type=int, default=512, help="how many games an actor plays at once (512)")
    parser.add_argument("--plot", metavar="FILE", help="where to draw how it went, such as rl.png")
    torch.set_num_threads(1)
    arpc.run(main(parser.parse_args()))
