"""The protocol of a pass alone: random forwards, and a network that delays and reorders as it likes."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from arpc.autograd.nodes import RecvRecord
from arpc.autograd.protocol import NOTHING_LIVE, Parcel, PassProtocol, pack_parcel, unpack_parcel
from arpc.errors import ProtocolError


class Worker:
    """One worker of the model: its forward is a list of sends and recvs, in the order they happened."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.sends: dict[int, int] = {}
        self.depends: dict[int, set[int]] = {}
        """For each recv, the later sends that its tensors went into."""
        self.senders: dict[int, int] = {}
        self.rooted: set[int] = set()
        """Recvs that the roots depend on, on the worker that has the roots."""
        self.protocol: PassProtocol | None = None
        self.parent: int | None = None
        self.has_ended = False
        self.resolved: dict[int, bool] = {}
        self.answered_for: Counter[int] = Counter()
        self.waiting: dict[int, set[int]] = {}


class Model:
    """Some workers, what is on its way between them, and the rules by which a worker acts."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.workers = [Worker(number) for number in range(self.dice.randint(1, 5))]
        self.network: list[tuple[str, int, int, Parcel | None]] = []
        self.parcels = 0
        for message in range(self.dice.randint(0, 25)):
            self._make_message(message)
        root = self.workers[0]
        root.rooted = {recv for recv in root.senders if self.dice.random() < 0.6}

    def _make_message(self, message: int) -> None:
        sender, receiver = self.dice.choice(self.workers), self.dice.choice(self.workers)
        sender.sends[message] = receiver.number
        for recv in sender.senders:
            if self.dice.random() < 0.4:
                sender.depends[recv].add(message)
        if self.dice.random() < 0.85:  # else it never arrived, or nobody recorded it
            receiver.senders[message] = sender.number
            receiver.depends[message] = set()

    def expected(self) -> dict[int, bool]:
        """Which sends get gradients, worked out from the end."""
        alive: dict[int, bool] = {}
        for worker in self.workers:
            for send in worker.sends:
                alive[send] = False
        for message in sorted(alive, reverse=True):
            for worker in self.workers:
                if message in worker.senders:
                    alive[message] = message in worker.rooted or any(alive[send] for send in worker.depends[message])
        return alive

    # -- what a worker does

    def engage(self, worker: Worker, parent: int | None) -> None:
        worker.parent = parent
        worker.protocol = PassProtocol(worker.number, worker.sends)
        # what the plan finds: all that some source may reach
        live = [recv for recv in worker.senders if worker.depends[recv] or recv in worker.rooted]
        self.take(worker, worker.protocol.planned([RecvRecord(recv, worker.senders[recv], 1) for recv in live]))
        worker.waiting = {recv: set(worker.depends[recv]) for recv in live}

    def take(self, worker: Worker, resolved) -> None:
        for send, gradients in resolved:
            assert send not in worker.resolved
            worker.resolved[send] = gradients is not None

    def run(self, worker: Worker) -> None:
        """Run all that is ready, which may make more so, on this very worker."""
        assert worker.protocol is not None
        while True:
            ready = [recv for recv, sends in worker.waiting.items() if sends <= worker.resolved.keys()]
            if not ready:
                return
            delivered, silent = [], []
            for recv in ready:
                sends = worker.waiting.pop(recv)
                worker.answered_for[recv] += 1
                has_gradient = recv in worker.rooted or any(worker.resolved[send] for send in sends)
                (delivered if has_gradient else silent).append(RecvRecord(recv, worker.senders[recv], 1))
            self.take(worker, worker.protocol.ran([(one, [object()]) for one in delivered], silent))

    def advance(self, worker: Worker, answering: int | None) -> Parcel | None:
        protocol = worker.protocol
        assert protocol is not None
        self.run(worker)
        riding = for_parent = None
        for peer, parcel in protocol.post():
            assert peer != worker.number
            if peer == answering:
                riding = parcel
                protocol.ride()
            elif peer == worker.parent:
                for_parent = parcel
                protocol.ride()
            else:
                self.send("parcel", worker.number, peer, parcel)
        if for_parent is not None and not protocol.is_done:
            protocol.sent()
            self.send("parcel", worker.number, worker.parent, for_parent)
            for_parent = None
        if protocol.is_done:
            worker.has_ended = True
            if worker.parent is not None:
                self.send("answer", worker.number, worker.parent, for_parent)
        return riding

    def send(self, kind: str, sender: int, to: int, parcel: Parcel | None) -> None:
        if parcel is not None:
            self.parcels += 1
            parcel, _ = unpack_parcel(pack_parcel(parcel))
        self.network.append((kind, sender, to, parcel))

    def deliver(self) -> None:
        """Anything on its way may be next."""
        kind, sender, to, parcel = self.network.pop(self.dice.randrange(len(self.network)))
        worker = self.workers[to]
        if kind == "answer":
            assert worker.protocol is not None
            assert not worker.has_ended
            worker.protocol.acknowledged()
            if parcel is not None:
                self.take(worker, worker.protocol.received(sender, parcel))
            self.advance(worker, None)
            return
        assert parcel is not None
        if worker.has_ended:
            assert not parcel.gradients
            self.send("answer", to, sender, NOTHING_LIVE)
        elif worker.protocol is None:
            self.engage(worker, sender)
            self.take(worker, worker.protocol.received(sender, parcel))
            self.advance(worker, None)
        else:
            self.take(worker, worker.protocol.received(sender, parcel))
            self.send("answer", to, sender, self.advance(worker, sender))

    def run_pass(self) -> None:
        root = self.workers[0]
        self.engage(root, None)
        self.advance(root, None)
        for _ in range(10_000):
            if not self.network:
                return
            self.deliver()
        raise AssertionError("it does not end")


@pytest.mark.parametrize("start", range(0, 2000, 500))
def test_every_pass_ends_with_every_send_resolved_as_it_must_be(start):
    for seed in range(start, start + 500):
        model = Model(seed)
        model.run_pass()
        expected = model.expected()
        assert model.workers[0].has_ended, seed
        for worker in model.workers:
            # who was not asked has nothing that anybody waits for
            if worker.protocol is None:
                assert not any(expected[send] for send in worker.sends), seed
                continue
            assert worker.has_ended, seed
            assert worker.resolved == {send: expected[send] for send in worker.sends}, seed
            assert all(count == 1 for count in worker.answered_for.values()), seed


def test_a_request_and_its_reply_take_one_parcel_each_way():
    caller, callee = PassProtocol(0, {1: 1}), PassProtocol(1, {2: 0})
    assert caller.planned([RecvRecord(2, 1, 1)]) == ()
    assert caller.ran([(RecvRecord(2, 1, 1), ["g"])], []) == ()
    ((to, parcel),) = caller.post()
    assert to == 1
    assert parcel == Parcel([(2, ["g"])], True, [], True)
    assert not caller.is_done
    assert callee.planned([RecvRecord(1, 0, 1)]) == ()
    assert callee.received(0, parcel) == [(2, ["g"])]
    assert callee.ran([(RecvRecord(1, 0, 1), ["h"])], []) == ()
    ((to, back),) = callee.post()
    assert (to, back) == (0, Parcel([(1, ["h"])], True, [], False))
    callee.ride()
    assert callee.is_done
    caller.acknowledged()
    assert caller.received(1, back) == [(1, ["h"])]
    assert caller.post() == []
    assert caller.is_done


def test_what_the_other_side_does_not_list_is_resolved():
    protocol = PassProtocol(0, {1: 1, 2: 1, 3: 2})
    protocol.planned([])
    assert protocol.received(1, Parcel(is_first=True, ids=[2])) == [(1, None)]
    assert protocol.received(1, Parcel(ids=[2])) == [(2, None)]
    assert not protocol.is_resolved
    assert protocol.received(2, NOTHING_LIVE) == [(3, None)]
    assert protocol.is_resolved


def test_an_announcement_that_is_overtaken_takes_nothing_back():
    protocol = PassProtocol(0, {1: 1, 2: 1})
    protocol.planned([])
    assert protocol.received(1, Parcel([(1, ["g"])])) == [(1, ["g"])]
    assert protocol.received(1, Parcel(is_first=True, ids=[1, 2])) == ()
    assert protocol.received(1, Parcel([(2, ["h"])])) == [(2, ["h"])]


def test_messages_to_oneself_need_no_parcel():
    protocol = PassProtocol(0, {1: 0, 2: 0})
    assert protocol.planned([RecvRecord(1, 0, 1)]) == [(2, None)]
    assert protocol.ran([(RecvRecord(1, 0, 1), ["g"])], []) == [(1, ["g"])]
    assert protocol.post() == []
    assert protocol.is_done


def test_a_worker_that_was_not_heard_of_is_asked_once():
    protocol = PassProtocol(0, {1: 1, 2: 1})
    protocol.planned([])
    assert protocol.post() == [(1, Parcel([], True, [], True))]
    assert protocol.post() == []


def test_gradients_for_an_unknown_message_are_an_error():
    protocol = PassProtocol(0, {})
    protocol.planned([])
    with pytest.raises(KeyError, match="7"):
        protocol.received(1, Parcel([(7, ["g"])]))


def test_parcels_survive_packing():
    for parcel in (
        Parcel([(5, ["a", None]), (6, ["b"])], True, [7, 8], True),
        Parcel([(1 << 63, ["a", None])], False, [7]),
        Parcel([], True, [9]),
    ):
        unpacked, numbers = unpack_parcel(pack_parcel(parcel, 3, 4), heading=2)
        assert unpacked._replace(ids=list(unpacked.ids)) == parcel._replace(ids=list(parcel.ids))
        assert numbers[:2] == [3, 4]
    assert unpack_parcel(pack_parcel(NOTHING_LIVE))[0] == Parcel([], True, (), False)


@pytest.mark.parametrize(
    "packed", [[], [b""], [5], [b"\x91\x01"], [b"\x92\xc3\x00"], [b"\x95\x00\x00\x01\x02\x03", "a"]]
)
def test_a_malformed_parcel_is_refused(packed):
    with pytest.raises(ProtocolError):
        unpack_parcel(packed)
