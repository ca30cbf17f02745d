"""A network of fork state machines: messages lie in a bag and arrive in any order, twice, or not at all.

What the shell around the machines promises is played here too: control messages are sent until they are answered,
creations and fork requests are handled once, and nobody is asked for a fork whose message may still arrive.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from arpc.ids import LOCAL_BITS, WorkerInfo, creator_of
from arpc.rref import instructions as i
from arpc.rref import states
from arpc.rref.exactly_once import Numbers, Window
from arpc.wire.messages import RRefChildAccept, RRefCreationFailed, RRefForkRequest, RRefUserDelete
from tests.rref import events as e

SETTLING_ROUNDS = 50


@dataclass(frozen=True)
class Packet:
    """A message on its way."""

    kind: str
    source: int
    target: int
    content: tuple[Any, ...]
    number: int = 0
    oldest: int = 0

    @property
    def may_be_lost(self) -> bool:
        """The others are sent again until they are answered, so they arrive in the end."""
        return self.kind in {"offer", "create"}

    @property
    def is_a_question(self) -> bool:
        """It is answered. Who asks a worker that is gone is told so."""
        return self.kind in {"request", "query", "failed", "creation_query"}


@dataclass
class Ids:
    """Hands out ids as `arpc.ids.IdAllocator` does, and can be copied: `itertools.count` cannot since Python 3.14."""

    next: int

    def next_number(self) -> int:
        self.next += 1
        return self.next - 1


@dataclass
class Machine:
    """One worker."""

    id: int
    forks: e.Machine
    ids: Ids
    numbers: dict[int, Numbers] = field(default_factory=dict)
    windows: dict[int, Window] = field(default_factory=dict)
    user_handles: list[int] = field(default_factory=list)
    owner_handles: list[int] = field(default_factory=list)
    running: list[tuple[int, Packet]] = field(default_factory=list)
    """Creations whose function has not returned."""
    is_alive: bool = True


class Network:
    """Some workers, and what is between them."""

    def __init__(self, size: int) -> None:
        self.machines: list[Machine] = []
        for id_ in range(size):
            self._start(f"w{id_}")
        self.bag: list[Packet] = []
        self.owner_of: dict[int, int] = {}
        self.values: set[int] = set()
        self.failed: set[int] = set()
        """Those whose users were told that they are never created."""
        self.creators: dict[int, tuple[int, int]] = {}
        """Creations that have not ended: RRef and number, by their first fork."""
        self.deaths = 0

    def _start(self, name: str) -> None:
        me = WorkerInfo(name, len(self.machines))
        self.machines.append(Machine(me.id, e.machine(me), Ids(me.id << LOCAL_BITS)))

    def info(self, id_: int) -> WorkerInfo:
        return self.machines[id_].forks.me

    # -- what users do

    def create(self, on: int, owner: int) -> None:
        machine = self.machines[on]
        rref, fork = machine.ids.next_number(), machine.ids.next_number()
        self.owner_of[rref] = owner
        self._happened(machine, e.CreationStarted(rref, fork, self.info(owner)))
        if on == owner:
            machine.owner_handles.append(rref)
        else:
            machine.user_handles.append(fork)
        numbers = machine.numbers.setdefault(owner, Numbers())
        number, oldest = numbers.take()
        self.creators[fork] = rref, number
        self.bag.append(Packet("create", on, owner, (rref, fork), number, oldest))

    def share(self, on: int) -> None:
        machine = self.machines[on]
        rref = machine.ids.next_number()
        self.owner_of[rref] = on
        self._happened(machine, e.ValueShared(rref))
        self.values.add(rref)
        machine.owner_handles.append(rref)

    def send_user(self, on: int, which: int, to: int) -> None:
        machine = self.machines[on]
        user = machine.forks.users[machine.user_handles[which]]
        if user.state in {states.UserState.FAILING, states.UserState.FAILED, states.UserState.LOST}:
            return  # its handle raises
        child = machine.ids.next_number()
        self._happened(machine, e.ForkOffered(user.rref, child, self.info(to), user.fork))
        self._offer(on, to, user.rref, child, user.is_created)

    def send_owner(self, on: int, which: int, to: int) -> None:
        machine = self.machines[on]
        rref = machine.owner_handles[which]
        owned = machine.forks.owned[rref]
        child = machine.ids.next_number()
        self._happened(machine, e.ForkOffered(rref, child, self.info(to), None))
        self._offer(on, to, rref, child, owned.state is not states.OwnerState.EXPECTED)

    def _offer(self, on: int, to: int, rref: int, child: int, is_created: bool) -> None:
        owner = self.info(self.owner_of[rref])
        self.bag.append(Packet("offer", on, to, (rref, child, owner, self.info(on), is_created)))

    def drop_user(self, on: int, which: int) -> None:
        machine = self.machines[on]
        self._happened(machine, e.HandleDropped(machine.user_handles.pop(which)))

    def drop_owner(self, on: int, which: int) -> None:
        machine = self.machines[on]
        self._happened(machine, e.OwnerHandleDropped(machine.owner_handles.pop(which)))

    def finish_creation(self, on: int, which: int) -> None:
        machine = self.machines[on]
        rref, request = machine.running.pop(which)
        self._happened(machine, e.CreationEnded(rref))
        self.bag.append(Packet("created", on, request.source, (request.content[1],)))

    def time_out_creation(self, on: int, fork: int) -> None:
        self._creation_settled(self.machines[on], fork, failed=True)

    # -- what the network does

    def deliver(self, which: int) -> None:
        self._arrive(self.bag.pop(which))

    def duplicate(self, which: int) -> None:
        packet = self.bag[which]
        if packet.kind != "offer":  # a user's call, which is never sent twice
            self._arrive(packet)

    def lose(self, which: int) -> None:
        packet = self.bag[which]
        if packet.may_be_lost:
            del self.bag[which]
            if packet.kind == "create":
                self._creation_settled(self.machines[packet.source], packet.content[1], failed=True)

    def query(self, on: int) -> None:
        """Ask after every offer that cannot be on its way any more."""
        under_way = {packet.content[1] for packet in self.bag if packet.kind == "offer"}
        asked = {packet.content[0] for packet in self.bag if packet.kind in {"query", "answer"}}
        for fork, offer in self.machines[on].forks.offers.items():
            to = offer.to.id
            if fork not in under_way | asked and to != on and self.machines[to].is_alive:
                self.bag.append(Packet("query", on, to, (fork,)))

    def arrive(self) -> None:
        """Let everything arrive that is on its way, and what follows from it."""
        while self.bag or any(machine.running for machine in self.machines):
            for machine in self.machines:
                while machine.running:
                    self.finish_creation(machine.id, 0)
            if self.bag:
                self.deliver(0)

    def settle(self) -> None:
        """The same, and find out what became of what never arrived."""
        for _ in range(SETTLING_ROUNDS):
            self.arrive()
            for machine in self.machines:
                if machine.is_alive:
                    self._lost_to_oneself(machine)
                    self.query(machine.id)
                    self.ask_creators(machine.id)
            if not self.bag:
                return
        raise AssertionError(f"the network does not come to rest: {self.bag}")

    def ask_creators(self, on: int) -> None:
        """Ask after every creation that a worker waits for."""
        asked = {packet.content[0] for packet in self.bag if packet.kind in {"creation_query", "creation_answer"}}
        for rref in list(self.machines[on].forks.owned):
            if self.machines[on].forks.is_expected(rref) and creator_of(rref) != on and rref not in asked:
                self.bag.append(Packet("creation_query", on, creator_of(rref), (rref,)))

    def _lost_to_oneself(self, machine: Machine) -> None:
        # nothing is lost between a worker and itself but what was thrown out of the bag here
        for fork, offer in list(machine.forks.offers.items()):
            if offer.to == machine.forks.me and fork not in machine.forks.users:
                self._happened(machine, e.OfferRefused(fork))

    def kill(self, which: int) -> None:
        """A worker dies. Its grace period outlasts whatever is on its way between the others."""
        self._end(which)
        self.arrive()
        for machine in self.machines:
            if machine.is_alive:
                self._lost(machine, which)
        self.settle()

    def restart(self, which: int) -> None:
        """A worker dies and comes back under its name. Others hear of that at any time, in any order."""
        self._end(which)
        self._start(self.info(which).name)
        for machine in self.machines[:-1]:
            if machine.is_alive:
                self.bag.append(Packet("lost", machine.id, machine.id, (which,)))
                self.bag.append(Packet("connected", machine.id, machine.id, (len(self.machines) - 1,)))

    def _end(self, which: int) -> None:
        dead = self.machines[which]
        dead.is_alive = False
        self.deaths += 1
        dead.user_handles.clear()
        dead.owner_handles.clear()
        dead.running.clear()

    def _lost(self, machine: Machine, dead: int) -> None:
        # nothing comes over a connection that has ended
        self.bag = [packet for packet in self.bag if (packet.source, packet.target) != (dead, machine.id)]
        for fork, (rref, _) in list(self.creators.items()):
            if creator_of(fork) == machine.id and self.owner_of[rref] == dead:
                self._creation_settled(machine, fork, failed=True)
        self._happened(machine, e.PeerLost(self.info(dead)))
        machine.windows.pop(dead, None)

    # -- inside

    def _arrive(self, packet: Packet) -> None:
        target = self.machines[packet.target]
        if target.is_alive:
            getattr(self, f"_{packet.kind}_arrived")(target, packet)
            return
        source = self.machines[packet.source]
        if packet.kind == "create":
            self._creation_settled(source, packet.content[1], failed=True)
        elif packet.is_a_question and source.is_alive:
            self._lost(source, target.id)

    def _lost_arrived(self, target: Machine, packet: Packet) -> None:
        self._lost(target, packet.content[0])

    def _connected_arrived(self, target: Machine, packet: Packet) -> None:
        self._happened(target, e.PeerConnected(self.info(packet.content[0])))

    def _is_new(self, target: Machine, packet: Packet) -> bool:
        return target.windows.setdefault(packet.source, Window()).admit(packet.number, packet.oldest)

    def _create_arrived(self, target: Machine, packet: Packet) -> None:
        rref, fork = packet.content
        if self._is_new(target, packet) and self._happened(
            target, e.CreationArrived(rref, fork, self.info(packet.source))
        ):
            target.running.append((rref, packet))

    def _created_arrived(self, target: Machine, packet: Packet) -> None:
        self._creation_settled(target, packet.content[0], failed=False)

    def _creation_settled(self, machine: Machine, fork: int, *, failed: bool) -> None:
        creation = self.creators.pop(fork, None)
        if creation is None or not machine.is_alive:
            return
        rref, number = creation
        owner = self.owner_of[rref]
        if owner == machine.id:
            window, oldest = machine.windows.setdefault(owner, Window()), machine.numbers[owner].oldest
            if failed and window.admit(number, oldest):
                self._happened(machine, e.CreationAbandoned(rref, fork, machine.forks.me, "failed"))
            self._happened(machine, e.UserDeleted(rref, fork))
        elif failed and machine.forks.users[fork].state is states.UserState.CREATING:
            self._happened(machine, e.CreationFailed(fork, number, "failed"))
            return  # the number is in use until the owner has answered
        elif not failed:
            self._happened(machine, e.CreationConfirmed(self.info(owner), rref, fork))
        machine.numbers[owner].settle(number)

    def _failed_arrived(self, target: Machine, packet: Packet) -> None:
        rref, fork, number = packet.content
        if target.windows.setdefault(packet.source, Window()).admit(number, packet.oldest):
            self._happened(target, e.CreationAbandoned(rref, fork, self.info(packet.source), "failed"))
        self.bag.append(Packet("acknowledged", target.id, packet.source, (rref, fork, number)))

    def _acknowledged_arrived(self, target: Machine, packet: Packet) -> None:
        rref, fork, number = packet.content
        target.numbers[packet.source].settle(number)
        self._happened(target, e.FailureAcknowledged(self.info(packet.source), rref, fork))

    def _creation_query_arrived(self, target: Machine, packet: Packet) -> None:
        rref = packet.content[0]
        is_under_way = rref in target.forks.creations_under_way(self.info(packet.source))
        self.bag.append(Packet("creation_answer", target.id, packet.source, (rref, is_under_way)))

    def _creation_answer_arrived(self, target: Machine, packet: Packet) -> None:
        rref, is_under_way = packet.content
        if not is_under_way:
            self._happened(target, e.CreationDenied(rref))

    def _offer_arrived(self, target: Machine, packet: Packet) -> None:
        rref, fork, owner, parent, is_created = packet.content
        refused = target.forks.refuses(fork)
        self._happened(target, e.ForkReceived(rref, fork, owner, parent, is_created))
        if owner == target.forks.me:
            if not refused and rref in target.forks.owned:
                target.owner_handles.append(rref)
        elif fork in target.forks.users:
            target.user_handles.append(fork)

    def _request_arrived(self, target: Machine, packet: Packet) -> None:
        rref, fork, is_created = packet.content
        if self._is_new(target, packet):
            self._happened(target, e.ForkRequested(rref, fork, self.info(packet.source), is_created))
        is_counted = target.forks.counts(rref, fork)
        self.bag.append(Packet("reply", target.id, packet.source, (rref, fork, is_counted, packet.number)))

    def _reply_arrived(self, target: Machine, packet: Packet) -> None:
        rref, fork, is_counted, number = packet.content
        target.numbers[packet.source].settle(number)
        owner = self.info(packet.source)
        self._happened(target, e.ForkConfirmed(owner, rref, fork) if is_counted else e.ForkRefused(fork))

    def _accept_arrived(self, target: Machine, packet: Packet) -> None:
        self._happened(target, e.ChildAccepted(packet.content[0]))

    def _delete_arrived(self, target: Machine, packet: Packet) -> None:
        self._happened(target, e.UserDeleted(*packet.content))

    def _query_arrived(self, target: Machine, packet: Packet) -> None:
        fork = packet.content[0]
        is_known = target.forks.knows(fork)
        self._happened(target, e.OfferQueried(fork, self.info(packet.source)))
        self.bag.append(Packet("answer", target.id, packet.source, (fork, is_known)))

    def _answer_arrived(self, target: Machine, packet: Packet) -> None:
        fork, is_known = packet.content
        self._happened(target, e.OfferKnown(fork) if is_known else e.OfferRefused(fork))

    def _happened(self, machine: Machine, event: e.Event) -> bool:
        runs = False
        for instruction in e.tell(machine.forks, event):
            match instruction:
                case i.Send(message, to, item) if message is RRefForkRequest:
                    numbers = machine.numbers.setdefault(to.id, Numbers())
                    self.bag.append(Packet("request", machine.id, to.id, item, *numbers.take()))
                case i.Send(message, to, item) if message is RRefChildAccept:
                    self.bag.append(Packet("accept", machine.id, to.id, item))
                case i.Send(message, to, item) if message is RRefUserDelete:
                    self.bag.append(Packet("delete", machine.id, to.id, item))
                case i.Send(message, to, item) if message is RRefCreationFailed:
                    oldest = machine.numbers[to.id].oldest
                    self.bag.append(Packet("failed", machine.id, to.id, item[:3], 0, oldest))
                case i.FailValue(owned):
                    rref = owned.rref
                    assert rref not in self.values, f"{rref} was created, and is said not to be"
                    self.failed.add(rref)
                case e.DropValue(rref):
                    if rref in self.values:  # else it was awaited only, and may still be created
                        self.values.discard(rref)
                        self._check_nobody_uses(rref)
                case e.RunCreation(rref):
                    assert rref not in self.values, f"{rref} is created twice"
                    assert rref not in self.failed, f"{rref} is created after its users were told that it never is"
                    self.values.add(rref)
                    runs = True
        return runs

    def _check_nobody_uses(self, rref: int) -> None:
        """The promise: no value is dropped while a user lives."""
        for machine in self.machines:
            if not machine.is_alive:
                continue
            assert rref not in machine.owner_handles, f"{rref} was dropped while its owner holds it"
            for fork in machine.user_handles:
                user = machine.forks.users[fork]
                counts = user.state is states.UserState.CONFIRMED or (
                    user.state is states.UserState.REQUESTED and not self.deaths
                )
                assert not (user.rref == rref and counts), (
                    f"{rref} was dropped while {machine.forks.me.name} holds {fork}"
                )
