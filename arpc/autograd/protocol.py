"""What workers tell each other in a backward pass, decided without any I/O: events in, parcels out.

Each worker that takes part knows the messages it sent in the forward (*sends*) and, once it has looked at its graph,
the messages it received whose tensors may get gradients (*live* recvs). The pass ends here when every send is
*resolved* (its gradients have come, or are known never to come), every live recv has been answered for, and whatever
this worker told others has been acknowledged.

- A live recv is answered for by its gradients, or by a *null* if its region ran and left it without any.
- The first parcel to a worker **announces**: it lists the live recvs from that worker that are still open. So the other
  side knows that all its other sends to here are resolved with nothing, be they unused, still on their way, or lost.
- A worker with unresolved sends to one that has not announced, and that it has told nothing yet, **asks** it to. So
  does one that takes over from a pass which told without asking; who has announced meanwhile need not do so again.
- Parcels and answers may overtake each other, so nothing is announced twice: the second would deny what is on its way.

The first parcel that reaches a worker makes its sender the *parent*, who is answered when all is over here; other
parcels are answered at once. Answers may carry a parcel themselves, which needs no answer. So the pass as a whole is
over when it is over at the worker that started it (the scheme of Dijkstra and Scholten).

It always ends: what a recv waits for are sends made after the message came. So, from the last send of the whole forward
backwards, each is resolved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from struct import Struct
from struct import error as StructError  # noqa: N812 - a class, whatever it is called
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import msgspec

from arpc.errors import ProtocolError

__all__ = [
    "NOTHING_LIVE",
    "PackedParcel",
    "Parcel",
    "PassProtocol",
    "Recv",
    "Resolved",
    "pack_parcel",
    "unpack_parcel",
]

Resolved: TypeAlias = "Sequence[tuple[int, Sequence[Any] | None]]"
"""Sends by their message id, with their gradients; None if they get none."""
_NOTHING: Final[Resolved] = ()
_Letter: TypeAlias = "tuple[list[tuple[int, Sequence[Any]]], list[int]]"
"""Gradients and nulls."""


class Recv(Protocol):
    """A message that was received, as far as the protocol is concerned."""

    @property
    def message_id(self) -> int: ...
    @property
    def sender(self) -> int: ...


class Parcel(NamedTuple):
    """What one worker tells another in a pass."""

    gradients: Sequence[tuple[int, Sequence[Any]]] = ()
    """By message id of a send of the receiver: a gradient for each of its tensors, None where there is none."""
    is_first: bool = False
    """It announces: ``ids`` are the receiver's sends that are still open here. Otherwise they are its nulls."""
    ids: Sequence[int] = ()
    asks: bool = False
    """The receiver has yet to announce, and its sender has unresolved sends that wait for that."""
    leaves: bool = False
    """The receiver may forget the context if it is left with nothing of it; or, of an answer, its sender has."""


PackedParcel: TypeAlias = list[Any]
"""A parcel as it travels: all numbers in one piece, then the gradients. It is as flat as can be, so pickles quickly."""

_SIMPLE: Final = tuple(Struct(f"<B{heading}QBQ") for heading in range(4))
"""By the length of its heading, a parcel with the gradients of one send and nothing else: a zero, which no other begins
with, the heading, the bits and the send."""
_FLAGS: Final = tuple((bool(bits & 1), bool(bits & 2), bool(bits & 4)) for bits in range(8))
"""What the bits in a parcel say: ``is_first``, ``asks`` and ``leaves``."""
_pack_simple: Final = tuple(simple.pack for simple in _SIMPLE)
_unpack_simple: Final = tuple(simple.unpack for simple in _SIMPLE)
_new_tuple: Final[Any] = tuple.__new__  # a named tuple's own takes three times as long
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[int]).decode


def pack_parcel(parcel: Parcel, *heading: int) -> PackedParcel:
    """Make a parcel ready to travel, with some numbers before it."""
    gradients, is_first, ids, asks, leaves = parcel
    bits = is_first | asks << 1 | leaves << 2
    if len(gradients) == 1 and not ids:  # as most are
        send, tensors = gradients[0]
        return [_pack_simple[len(heading)](0, *heading, bits, send), *tensors]
    numbers = [*heading, bits, len(ids), *ids]
    flat: list[Any] = []
    for send, tensors in gradients:
        numbers += (send, len(tensors))
        flat += tensors
    return [_encode(numbers), *flat]


def unpack_parcel(packed: PackedParcel, heading: int = 0) -> tuple[Parcel, Sequence[int]]:
    """The parcel that was packed, and all its numbers, which begin with those of the heading.

    What was packed is emptied: whoever takes the gradients shall be the only one that has them.
    """
    numbers: Sequence[int]
    try:
        head, *tensors = packed
        packed.clear()
        if not head[0]:
            numbers = _unpack_simple[heading](head)[1:]
            is_first, asks, leaves = _FLAGS[numbers[heading]]
            made: Parcel = _new_tuple(Parcel, ([(numbers[-1], tensors)], is_first, (), asks, leaves))
            return made, numbers
        numbers = _decode(head)
        is_first, asks, leaves = _FLAGS[numbers[heading]]
        end = heading + 2 + numbers[heading + 1]
        ids = numbers[heading + 2 : end] if numbers[heading + 1] else ()
        gradients: list[tuple[int, Sequence[Any]]] = []
        place = 0
        for send, count in zip(numbers[end::2], numbers[end + 1 :: 2], strict=True):
            gradients.append((send, tensors[place : place + count]))
            place += count
    except (StructError, msgspec.MsgspecError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ProtocolError(f"a malformed parcel of gradients: {error}") from error
    return Parcel(gradients, is_first, ids, asks, leaves), numbers


NOTHING_LIVE = Parcel(is_first=True)
"""The announcement of a worker where no gradient can go."""


class PassProtocol:
    """One pass on one worker.

    ``sends``: to which worker each send of the context went, by message id.
    """

    def __init__(self, me: int, sends: Mapping[int, int]) -> None:
        self._me = me
        self.unresolved = {**sends}
        """The sends that wait, and where they went."""
        self._open: dict[int, dict[int, None]] = {}
        """Live recvs that have not been answered for, by sender."""
        self.announced_to: set[int] = set()
        """Who was told what is live here."""
        self._announced_by: set[int] = set()
        self._asked_by: set[int] = set()
        self._unasked: set[int] = set()
        """Who was told what is live here, and not asked."""
        self._unacknowledged = 0
        self._is_planned = False
        self._outbox: dict[int, _Letter] = {}

    def take_over(self, told: Iterable[int], unasked: Iterable[int], heard: Iterable[int], unacknowledged: int) -> None:
        """Begin with what has happened before.

        That is who was told of the pass, which of them were not asked, who has announced, and what is not answered.
        """
        self.announced_to.update(told)
        self._unasked.update(unasked)
        self._announced_by.update(heard)
        self._unacknowledged += unacknowledged

    # -- events; each returns the sends that it resolves, with their gradients or None

    def planned(self, live: Iterable[Recv]) -> Resolved:
        """The graph has been looked at, and these are the live recvs."""
        self._is_planned = True
        open_, me = self._open, self._me
        for recv in live:
            if recv.sender in open_:
                open_[recv.sender][recv.message_id] = None
            else:
                open_[recv.sender] = {recv.message_id: None}
        if me not in self.unresolved.values():
            return _NOTHING
        mine = open_.get(me, ())
        return self._resolve((), [send for send, to in self.unresolved.items() if to == me and send not in mine])

    def received(self, sender: int, parcel: Parcel) -> Resolved:
        """A parcel has come. Raises `KeyError` with the id of a message that is not among the sends."""
        gradients, is_first, nulls, asks, _ = parcel
        if asks:
            self._asked_by.add(sender)
        if is_first:
            self._announced_by.add(sender)
            if len(gradients) == len(self.unresolved):
                nulls = ()  # all that wait get theirs
            else:
                alive = {*nulls, *[send for send, _ in gradients]}
                nulls = [send for send, to in self.unresolved.items() if to == sender and send not in alive]
        return self._resolve(gradients, nulls)

    def ran(self, delivered: Iterable[tuple[Recv, Sequence[Any]]], silent: Iterable[Recv]) -> Resolved:
        """Nodes have run: the recvs that they reached with their gradients, and those that stay without any."""
        own_gradients: list[tuple[int, Sequence[Any]]] = []
        own_nulls: list[int] = []
        for recv, gradients in delivered:
            self._close(recv)
            if recv.sender == self._me:
                own_gradients.append((recv.message_id, gradients))
            else:
                self._letter(recv.sender)[0].append((recv.message_id, gradients))
        for recv in silent:
            self._close(recv)
            if recv.sender == self._me:
                own_nulls.append(recv.message_id)
            else:
                self._letter(recv.sender)[1].append(recv.message_id)
        return self._resolve(own_gradients, own_nulls) if own_gradients or own_nulls else _NOTHING

    def acknowledged(self) -> None:
        """One of this worker's parcels has been answered."""
        self._unacknowledged -= 1

    # -- parcels

    def post(self) -> list[tuple[int, Parcel]]:
        """What is to be told now, and to whom. Each parcel counts as unacknowledged, see `ride`.

        To be called when nothing more can run here before something else happens.
        """
        if self._asked_by:
            for peer in self._asked_by:
                self._letter(peer)
            self._asked_by.clear()
        announced_to = self.announced_to
        for peer in self.unresolved.values():
            if (
                peer != self._me
                and peer not in self._announced_by
                and (peer not in announced_to or peer in self._unasked)
            ):
                self._letter(peer)
        posted: list[tuple[int, Parcel]] = []
        if self._outbox:
            outbox, self._outbox = self._outbox, {}
            for peer, (gradients, nulls) in outbox.items():
                if peer not in announced_to:
                    announced_to.add(peer)
                    asks = peer not in self._announced_by and peer in self.unresolved.values()
                    posted.append((peer, Parcel(gradients, True, list(self._open.get(peer, ())), asks)))
                elif peer in self._unasked and peer not in self._announced_by:
                    # It is not told once more what is live: the first parcel may come after this one
                    self._unasked.discard(peer)
                    posted.append((peer, Parcel(gradients, False, nulls, asks=peer in self.unresolved.values())))
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

    # -- the end

    @property
    def is_done(self) -> bool:
        """Nothing is left to be done or waited for here, once what has been posted is under way."""
        return not self._unacknowledged and self.is_resolved

    @property
    def is_resolved(self) -> bool:
        """Nothing can run here any more."""
        return self._is_planned and not (self.unresolved or self._open or self._outbox or self._asked_by)

    # -- inner workings

    def _letter(self, peer: int) -> _Letter:
        letter = self._outbox.get(peer)
        if letter is None:
            letter = self._outbox[peer] = ([], [])
        return letter

    def _close(self, recv: Recv) -> None:
        waiting = self._open[recv.sender]
        del waiting[recv.message_id]
        if not waiting:
            del self._open[recv.sender]

    def _resolve(self, gradients: Sequence[tuple[int, Sequence[Any]]], nulls: Iterable[int]) -> Resolved:
        for send, _ in gradients:
            del self.unresolved[send]
        if not nulls:
            return gradients
        # the forward may go on meanwhile: of a send made since the pass began nothing is known here, nor needed
        return [*gradients, *[(send, None) for send in nulls if self.unresolved.pop(send, None) is not None]]
