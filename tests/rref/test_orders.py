"""Small stories in every order: what users do and what the network does are interleaved in all ways there are.

`test_network` tries long stories at random. Here nothing is left to chance: a rule of the protocol may matter in one
order out of thousands.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.rref.network import Network

A, B, C = 0, 1, 2
Action = Callable[[Network], bool]
"""Something a worker does as soon as it can; False if it cannot yet."""


def create(on: int, owner: int) -> Action:
    def act(network: Network) -> bool:
        network.create(on, owner)
        return True

    return act


def share(on: int) -> Action:
    def act(network: Network) -> bool:
        network.share(on)
        return True

    return act


def send(on: int, to: int) -> Action:
    def act(network: Network) -> bool:
        machine = network.machines[on]
        if machine.user_handles:
            network.send_user(on, 0, to)
        elif machine.owner_handles:
            network.send_owner(on, 0, to)
        else:
            return False
        return True

    return act


def drop(on: int) -> Action:
    def act(network: Network) -> bool:
        machine = network.machines[on]
        if machine.user_handles:
            network.drop_user(on, 0)
        elif machine.owner_handles:
            network.drop_owner(on, 0)
        else:
            return False
        return True

    return act


def give_up(on: int) -> Action:
    def act(network: Network) -> bool:
        for fork in list(network.creators):
            network.time_out_creation(on, fork)
        return True

    return act


class Story:
    """A network, and how far each worker has come in what it does."""

    def __init__(self, roles: Sequence[Sequence[Action]]) -> None:
        self.network = Network(3)
        self.roles = roles
        self.done = [0] * len(roles)

    def moves(self) -> Iterator[Callable[[Story], bool]]:
        """What may happen next."""
        for number, role in enumerate(self.roles):
            if self.done[number] < len(role):
                yield lambda story, number=number: story.act(number)
        for which in range(len(self.network.bag)):
            yield lambda story, which=which: story.deliver(which)
        for machine in self.network.machines:
            if machine.running:
                yield lambda story, on=machine.id: story.finish(on)

    def act(self, number: int) -> bool:
        if not self.roles[number][self.done[number]](self.network):
            return False
        self.done[number] += 1
        return True

    def deliver(self, which: int) -> bool:
        self.network.deliver(which)
        return True

    def finish(self, on: int) -> bool:
        self.network.finish_creation(on, 0)
        return True

    def state(self) -> str:
        """The same for stories that can go on in the same ways only."""
        machines = [
            (
                [(user.fork, user.state.name, user.handles, user.children) for user in machine.forks.users.values()],
                [
                    (owned.rref, owned.state.name, sorted(owned.forks), owned.holds)
                    for owned in machine.forks.owned.values()
                ],
                sorted(machine.forks.offers),
                machine.user_handles,
                machine.owner_handles,
                [rref for rref, _ in machine.running],
            )
            for machine in self.network.machines
        ]
        bag = sorted((packet.kind, packet.source, packet.target, str(packet.content)) for packet in self.network.bag)
        return str((self.done, machines, bag))

    def check_end(self) -> None:
        """Nothing can happen any more: nothing may be left, but for what a story leaves on purpose."""
        assert all(done == len(role) for done, role in zip(self.done, self.roles, strict=True)), "a worker is stuck"
        for machine in self.network.machines:
            assert machine.forks.is_idle, machine.forks.me
        assert not self.network.values


def explore(roles: Sequence[Sequence[Action]]) -> int:
    """Tell a story in every order; how many states there were."""
    seen: set[str] = set()
    left = [Story(roles)]
    while left:
        story = left.pop()
        is_over = True
        for move in story.moves():
            following = copy.copy(story)
            following.network, following.done = copy.deepcopy((story.network, story.done))
            if not move(following):
                continue
            is_over = False
            state = following.state()
            if state not in seen:
                seen.add(state)
                left.append(following)
        if is_over:
            story.check_end()
    return len(seen)


STORIES = {
    "made-and-dropped": [[create(A, B), drop(A)]],
    "made-on-oneself": [[create(A, A), drop(A)]],
    "to-another-user": [[create(A, B), send(A, C), drop(A)], [drop(C)]],
    "to-another-user-and-on": [[create(A, B), send(A, C), drop(A), drop(A)], [send(C, A), drop(C)]],
    "to-two-children": [[create(A, B), send(A, C), send(A, C), drop(A)], [drop(C), drop(C)]],
    "to-its-owner": [[create(A, B), send(A, B), drop(A)], [drop(B)]],
    "to-oneself": [[create(A, B), send(A, A), drop(A), drop(A)]],
    "from-its-owner": [[share(B), send(B, A), drop(B)], [send(A, C), drop(A)], [drop(C)]],
    "from-its-owner-and-back": [[share(B), send(B, A), drop(B), drop(B)], [send(A, B), drop(A)]],
}


@pytest.mark.parametrize("name", STORIES)
def test_in_every_order_nothing_is_dropped_too_early_or_kept_for_ever(name):
    assert explore(STORIES[name]) > 5


def test_a_creation_may_be_given_up_at_any_moment():
    assert explore([[create(A, B), drop(A)], [give_up(A)]]) > 10
