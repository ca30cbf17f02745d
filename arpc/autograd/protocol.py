"""What workers tell each other in a backward pass, decided without any I/O: events in, parcels out.

Each worker that takes part knows the messages it sent in the forward (*sends*) and, once it has looked at its graph,
the messages it received whose tensors may get gradients (*live* recvs). The pass ends here when every send is
*resolved* (its gradients have come, or are known never to come), every live recv has been answered for, and whatever
this worker told others has been acknowledged.

- A live recv is answered for by its gradients, or by a *null* if its region ran and left it without any.
- The first parcel to a worker **announces**: it lists the live recvs from that worker that are still open. So the other
  side knows that all its other sends to here are resolved with nothing, be they unused, still on their way, or lost.
- A worker with unresolved sends to one that has not announced, and that it has told nothing yet, **asks** it to.

The first parcel that reaches a worker makes its sender the *parent*, who is answered when all is over here; other
parcels are answered at once. Answers may carry a parcel themselves, which needs no answer. So the pass as a whole is
over when it is over at the worker that started it (the scheme of Dijkstra and Scholten).

It always ends: what a recv waits for are sends made after the message came. So, from the last send of the whole forward
backwards, each is resolved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

__all__ = ["NOTHING_LIVE", "PackedParcel", "Parcel", "PassProtocol", "pack_parcel", "unpack_parcel"]


class Parcel(NamedTuple):
    """What one worker tells another in a pass."""

    gradients: Sequence[tuple[int, Sequence[Any]]] = ()
    """By message id of a send of the receiver: a gradient for each of its tensors, None where there is none."""
    is_first: bool = False
    """It announces: ``ids`` are the receiver's sends that are still open here. Otherwise they are its nulls."""
    ids: Sequence[int] = ()
    asks: bool = False
    """The receiver has yet to announce, and its sender has unresolved sends that wait for that."""


PackedParcel = tuple[list[int], list[Any]]
"""A parcel as it travels: as plain and flat as can be, which is what pickles quickly."""

_IS_FIRST: Final = 1
_ASKS: Final = 2


def pack_parcel(parcel: Parcel) -> PackedParcel:
    """Make a parcel ready to travel."""
    numbers = [_IS_FIRST * parcel.is_first | _ASKS * parcel.asks, len(parcel.ids), *parcel.ids]
    tensors: list[Any] = []
    for send, gradients in parcel.gradients:
        numbers += (send, len(gradients))
        tensors += gradients
    return numbers, tensors


def unpack_parcel(numbers: list[int], tensors: list[Any]) -> Parcel:
    """The parcel that was packed."""
    end = 2 + numbers[1]
    gradients: list[tuple[int, Sequence[Any]]] = []
    place = 0
    for send, count in zip(numbers[end::2], numbers[end + 1 :: 2], strict=True):
        gradients.append((send, tensors[place : place + count]))
        place += count
    return Parcel(gradients, bool(numbers[0] & _IS_FIRST), numbers[2:end], bool(numbers[0] & _ASKS))


NOTHING_LIVE = Parcel(is_first=True)
"""The announcement of a worker where no gradient can go."""


class PassProtocol:
    """One pass on one worker.

    ``sends``: to which worker each send of the context went, by message id.
    """

    def __init__(self, me: int, sends: Mapping[int, int]) -> None:
        self._me = me
        self.unresolved = dict(sends)
        """The sends that wait, and where they went."""
        self._open: dict[int, dict[int, None]] = {}
        """Live recvs that have not been answered for, by sender."""
        self._announced_to: set[int] = set()
        self._announced_by: set[int] = set()
        self._asked_by: set[int] = set()
        self._unacknowledged = 0
        self._is_planned = False
        self._outbox: dict[int, tuple[list[tuple[int, Sequence[Any]]], list[int]]] = {}

    # -- events; each returns the sends that it resolves, with their gradients or None

    def planned(self, live: Iterable[tuple[int, int]]) -> list[tuple[int, Sequence[Any] | None]]:
        """The graph has been looked at: message id and sender of each live recv."""
        self._is_planned = True
        for message_id, sender in live:
            self._open.setdefault(sender, {})[message_id] = None
        mine = self._open.get(self._me, {})
        return self._resolve([], [send for send, to in self.unresolved.items() if to == self._me and send not in mine])

    def received(self, sender: int, parcel: Parcel) -> list[tuple[int, Sequence[Any] | None]]:
        """A parcel has come. Raises `KeyError` with the id of a message that is not among the sends."""
        nulls: Iterable[int] = parcel.ids
        if parcel.asks:
            self._asked_by.add(sender)
        if parcel.is_first:
            self._announced_by.add(sender)
            alive = {*parcel.ids, *[send for send, _ in parcel.gradients]}
            nulls = [send for send, to in self.unresolved.items() if to == sender and send not in alive]
        return self._resolve(parcel.gradients, nulls)

    def ran(
        self, delivered: Iterable[tuple[int, int, Sequence[Any]]], silent: Iterable[tuple[int, int]]
    ) -> list[tuple[int, Sequence[Any] | None]]:
        """Nodes have run: message id, sender and gradients of the recvs they reached; those that stay without any."""
        own_gradients: list[tuple[int, Sequence[Any]]] = []
        own_nulls: list[int] = []
        for message_id, sender, gradients in delivered:
            self._close(message_id, sender)
            if sender == self._me:
                own_gradients.append((message_id, gradients))
            else:
                self._letter(sender)[0].append((message_id, gradients))
        for message_id, sender in silent:
            self._close(message_id, sender)
            if sender == self._me:
                own_nulls.append(message_id)
            else:
                self._letter(sender)[1].append(message_id)
        return self._resolve(own_gradients, own_nulls)

    def acknowledged(self) -> None:
        """One of this worker's parcels has been answered."""
        self._unacknowledged -= 1

    # -- parcels

    def post(self) -> list[tuple[int, Parcel]]:
        """What is to be told now, and to whom. Each parcel counts as unacknowledged, see `ride`.

        To be called when nothing more can run here before something else happens.
        """
        outbox = self._outbox
        for peer in self._asked_by:
            self._letter(peer)
        self._asked_by.clear()
        for peer in self.unresolved.values():
            if peer != self._me and peer not in self._announced_by and peer not in self._announced_to:
                self._letter(peer)
        self._outbox = {}
        posted = []
        for peer, (gradients, nulls) in outbox.items():
            if peer not in self._announced_to:
                self._announced_to.add(peer)
                open_ = list(self._open.get(peer, ()))
                posted.append((peer, Parcel(gradients, True, open_, self._wants_announcement(peer))))
            elif gradients or nulls:
                posted.append((peer, Parcel(gradients, False, nulls)))
        self._unacknowledged += len(posted)
        return posted

    def ride(self) -> None:
        """One of the parcels just posted goes with an answer, and so needs none itself."""
        self._unacknowledged -= 1

    def sent(self) -> None:
        """One of them that was to ride has been sent by itself after all."""
        self._unacknowledged += 1

    def _wants_announcement(self, peer: int) -> bool:
        return peer not in self._announced_by and peer in self.unresolved.values()

    # -- the end

    @property
    def is_done(self) -> bool:
        """Nothing is left to be done or waited for here, once what has been posted is under way."""
        return self.is_resolved and not self._unacknowledged

    @property
    def is_resolved(self) -> bool:
        """Nothing can run here any more."""
        return self._is_planned and not (self.unresolved or self._open or self._outbox or self._asked_by)

    # -- inner workings

    def _letter(self, peer: int) -> tuple[list[tuple[int, Sequence[Any]]], list[int]]:
        letter = self._outbox.get(peer)
        if letter is None:
            letter = self._outbox[peer] = ([], [])
        return letter

    def _close(self, message_id: int, sender: int) -> None:
        waiting = self._open[sender]
        del waiting[message_id]
        if not waiting:
            del self._open[sender]

    def _resolve(
        self, gradients: Iterable[tuple[int, Sequence[Any]]], nulls: Iterable[int]
    ) -> list[tuple[int, Sequence[Any] | None]]:
        resolved: list[tuple[int, Sequence[Any] | None]] = []
        for send, given in gradients:
            del self.unresolved[send]
            resolved.append((send, given))
        # the forward may go on meanwhile: of a send made since the pass began nothing is known here, nor needed
        resolved += [(send, None) for send in nulls if self.unresolved.pop(send, None) is not None]
        return resolved
