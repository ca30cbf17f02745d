"""Two to five workers make, send and drop RRefs at random, over a network that keeps no order and repeats itself.

Whatever happens: no value is dropped while a user lives, none is kept when the last user is gone, and none is expected
for ever: users of a value that will not be created get an error.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from arpc.ids import creator_of
from tests.rref.network import Network

CHOICE = st.integers(0, 10**6)


class Workers(RuleBasedStateMachine):
    network: Network

    @initialize(size=st.integers(2, 5))
    def start(self, size):
        self.network = Network(size)

    def _alive(self):
        return [machine for machine in self.network.machines if machine.is_alive]

    def _worker(self, choice):
        return self._alive()[choice % len(self._alive())].id

    def _holder(self, choice, attribute):
        holders = [machine for machine in self._alive() if getattr(machine, attribute)]
        machine = holders[choice % len(holders)]
        return machine.id, choice % len(getattr(machine, attribute))

    def _anybody_has(self, attribute):
        return any(getattr(machine, attribute) for machine in self.network.machines)

    @rule(on=CHOICE, owner=CHOICE)
    def create(self, on, owner):
        self.network.create(self._worker(on), self._worker(owner))

    @rule(on=CHOICE)
    def share(self, on):
        self.network.share(self._worker(on))

    @precondition(lambda self: self._anybody_has("user_handles"))
    @rule(which=CHOICE, to=CHOICE)
    def send_from_a_user(self, which, to):
        self.network.send_user(*self._holder(which, "user_handles"), self._worker(to))

    @precondition(lambda self: self._anybody_has("owner_handles"))
    @rule(which=CHOICE, to=CHOICE)
    def send_from_an_owner(self, which, to):
        self.network.send_owner(*self._holder(which, "owner_handles"), self._worker(to))

    @precondition(lambda self: self._anybody_has("user_handles"))
    @rule(which=CHOICE)
    def drop_a_user(self, which):
        self.network.drop_user(*self._holder(which, "user_handles"))

    @precondition(lambda self: self._anybody_has("owner_handles"))
    @rule(which=CHOICE)
    def drop_an_owner(self, which):
        self.network.drop_owner(*self._holder(which, "owner_handles"))

    @precondition(lambda self: self._anybody_has("running"))
    @rule(which=CHOICE)
    def finish_a_creation(self, which):
        self.network.finish_creation(*self._holder(which, "running"))

    @precondition(lambda self: self.network.creators)
    @rule(which=CHOICE)
    def give_a_creation_up(self, which):
        forks = list(self.network.creators)
        fork = forks[which % len(forks)]
        self.network.time_out_creation(creator_of(fork), fork)

    @precondition(lambda self: self.network.bag)
    @rule(which=CHOICE)
    def deliver(self, which):
        self.network.deliver(which % len(self.network.bag))

    @precondition(lambda self: self.network.bag)
    @rule(which=CHOICE)
    def deliver_twice(self, which):
        self.network.duplicate(which % len(self.network.bag))

    @precondition(lambda self: self.network.bag)
    @rule(which=CHOICE)
    def lose(self, which):
        self.network.lose(which % len(self.network.bag))

    @rule(on=CHOICE)
    def ask_after_offers(self, on):
        self.network.query(self._worker(on))

    @precondition(lambda self: len(self._alive()) > 2)
    @rule(which=CHOICE)
    def kill(self, which):
        self.network.kill(self._worker(which))

    @precondition(lambda self: len(self.network.machines) < 12)
    @rule(which=CHOICE)
    def restart(self, which):
        self.network.restart(self._worker(which))

    @rule(on=CHOICE)
    def ask_creators(self, on):
        self.network.ask_creators(self._worker(on))

    def teardown(self):
        network = self.network
        network.settle()
        for machine in self._alive():
            assert not any(map(machine.forks.is_expected, machine.forks.owned)), machine.forks.me
            while machine.user_handles:
                network.drop_user(machine.id, 0)
            while machine.owner_handles:
                network.drop_owner(machine.id, 0)
        network.settle()
        for machine in self._alive():
            assert not machine.forks.users, machine.forks.me
            assert not machine.forks.offers, machine.forks.me
            assert not machine.forks.owned, machine.forks.me
        alive = {machine.id for machine in self._alive()}
        assert not {rref for rref in network.values if network.owner_of[rref] in alive}


TestWorkers = Workers.TestCase
TestWorkers.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
