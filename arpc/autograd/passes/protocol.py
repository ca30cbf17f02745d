"""What happens in a backward pass on one worker, decided without any I/O: events in, runs and parcels out.

Each worker that takes part has a `Plan` of its own graph. The pass ends there when every send is *resolved* (its
gradients have come, or are known never to come), every region has run, and the parcels to others are acknowledged.

- Regions that are ready run together. When all regions that lead to a recv have run, the sum of its gradients goes to
  the worker that sent the message, or the news that there are none.
- The first parcel to a worker lists those of its sends that may still get gradients from here. So it knows that all its
  other sends to here get none, be they unused, still on their way, or lost.
- The first parcel to a worker that was not heard from **asks**: it says how many sends wait for that worker. A worker
  that has fewer open tells so at once, since what is open there may wait for what is not. Otherwise it writes anyway.
- A worker with unresolved sends to one that it neither heard from nor wrote to writes a first parcel without gradients.
- Parcels and answers may overtake each other, so nothing is announced twice: the second would deny what is on its way.

The first parcel that reaches a worker makes its sender the *parent*, which is answered when all is over there; other
parcels are answered at once. Answers may carry a parcel themselves, which needs no answer. So the pass as a whole is
over when it is over on the worker that began it (the scheme of Dijkstra and Scholten).

It always ends: what a recv waits for are messages sent after it came. So, from the last message of the forward
backwards, each is resolved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from arpc.autograd.nodes import LeafNode, RecvRecord
from arpc.autograd.passes.messages import Parcel
from arpc.autograd.passes.plan import Edge, Plan, Region
from arpc.errors import AutogradError

__all__ = ["Captured", "LeafSums", "PassProtocol", "Run"]

Captured: TypeAlias = "Iterable[tuple[Edge, Any]]"
"""Gradients that a run computed, by the edges where they were caught; None where there is none."""
_Letter: TypeAlias = "tuple[list[tuple[int, Sequence[Any]]], list[int]]"
"""What waits to be told to a worker: gradients of its sends, and sends that get none."""
_new_tuple: Final[Any] = tuple.__new__  # a named tuple's own takes three times as long
_FREED: Final = (
    "Trying to backward through the graph a second time, and the first pass has freed it. Pass retain_graph=True to "
    "the first `arpc.autograd.backward`"
)


class LeafSums(Protocol):
    """Where gradients of leaves are summed up."""

    def add(self, leaf: Any, gradient: Any) -> None: ...


class Run(NamedTuple):
    """An instruction: run these regions with these gradients, and say by `PassProtocol.ran` what was captured."""

    regions: Sequence[Region]
    entering: Sequence[tuple[Edge, Any]]
    may_cross: bool
    """Edges may lead from these regions into others that must not run yet."""


class PassProtocol:
    """One pass on one worker. Gradients and nodes are opaque: gradients can be added, nodes are keys."""

    _late: Sequence[Region] = ()
    """Regions that could run, and wait for the first of the regions that they lead into."""
    _asked_by: Sequence[int] = ()
    """Workers that have asked, and are to be told at once what is open here."""
    _unacknowledged = 0

    def __init__(
        self,
        me: int,
        plan: Plan,
        leaves: LeafSums,
        pass_id: int = 0,
        *,
        retain_graph: bool = False,
        told: Iterable[int] = (),
        heard: Iterable[int] = (),
        leaf_class: type = LeafNode,
    ) -> None:
        """``told``, ``heard``: workers that exchanged first parcels with this one before it knew the context."""
        self._me = me
        self._plan = plan
        self._owners = plan.owners
        self._leaves = leaves
        self._leaf_class: Any = leaf_class
        self._pass_id = pass_id
        self._retain_graph = retain_graph
        self.told = set(told)
        """Workers that a first parcel was written to."""
        self.used: list[int] = []
        """The sends that got gradients."""
        self._heard = set(heard)
        self._ready: list[Region] = []
        self._unresolved: dict[int, dict[int, Region]] = {}
        """Sends that wait, by the worker they went to and by message id."""
        self._counts: dict[RecvRecord, int] = {}
        """For each recv that may get gradients, how many regions lead to it that have not run."""
        self._gradients: dict[RecvRecord, list[Any]] = {}
        self._outbox: dict[int, _Letter] = {}
        self._begin()

    def _begin(self) -> None:
        counts, unresolved, cutoff = self._counts, self._unresolved, self._plan.cutoff
        dead: list[Region] = []
        for region in self._plan.regions:
            for record in region.recvs:
                counts[record] = counts.get(record, 0) + 1
            send = region.send
            if send is None:
                self._ready.append(region)
            elif send.stamp > cutoff:
                dead.append(region)
            elif send.to in unresolved:
                unresolved[send.to][region.message_id] = region
            else:
                unresolved[send.to] = {region.message_id: region}
        for region in dead:
            self._settle_dead(region)
        self._strangers = set(unresolved)
        """Workers that sends wait for, and that were neither heard from nor written to."""
        if self.told or self._heard:
            self._strangers -= self.told | self._heard
        if (mine := unresolved.get(self._me)) is not None:
            self._strangers.discard(self._me)
            live = set(self._open(self._me))
            self._resolve_none(self._me, [message_id for message_id in mine if message_id not in live])

    def _open(self, sender: int) -> list[int]:
        """The messages of a worker whose tensors may still get gradients from here."""
        return [record.message_id for record in self._counts if record.sender == sender]

    def _settle_dead(self, region: Region) -> None:
        """Nothing ever enters a region: it is over before anything is announced."""
        todo = [region]
        while todo:
            region = todo.pop()
            region.waits -= 1
            if region.waits:
                continue
            region.is_over = True
            todo += region.touches
            for record in region.recvs:
                self._counts[record] -= 1
                if not self._counts[record]:
                    del self._counts[record]

    # -- events

    def enter_roots(self, edges: Iterable[Edge], gradients: Iterable[Any]) -> None:
        """The pass begins here, with these gradients of the roots."""
        roots = self._plan.regions[-1]
        for edge, gradient in zip(edges, gradients, strict=True):
            self._feed(roots, edge, gradient)

    def received(self, sender: int, parcel: Parcel) -> None:
        """A parcel has come. Raises `KeyError` with a message id for gradients of what is not among the sends."""
        gradients, is_first, ids, asks, _ = parcel
        if asks is not None and sender not in self.told:
            count, last = asks
            if sum([message_id <= last for message_id in self._open(sender)]) != count:
                self._asked_by = (*self._asked_by, sender)
        if is_first:
            self._heard.add(sender)
            self._strangers.discard(sender)
        waiting = self._unresolved.get(sender)
        if waiting is None:
            if gradients:
                raise KeyError(gradients[0][0])
            return
        for message_id, tensors in gradients:
            self._resolve(waiting.pop(message_id), tensors)
        if not waiting:
            return
        if is_first:
            alive = set(ids)
            ids = [message_id for message_id in waiting if message_id not in alive]
        if ids:
            self._resolve_none(sender, ids)

    def ran(self, run: Run, captured: Captured) -> None:
        """Regions have run."""
        owners, leaf_class, add_for_recv = self._owners, self._leaf_class, self._add_for_recv
        for region in run.regions:
            region.is_over = True
        for edge, gradient in captured:
            if gradient is None:
                continue
            node, place = edge
            owner = owners.get(node)
            if owner is not None and not owner.is_over:
                owner.entering.append((edge, gradient))
            elif node.__class__ is leaf_class:
                self._leaves.add(node.variable, gradient)
            else:
                add_for_recv(node.record, place, gradient)
        self._close(run.regions)

    def acknowledged(self) -> None:
        """One of this worker's parcels has been answered."""
        self._unacknowledged -= 1

    # -- instructions

    def next_run(self) -> Run | None:
        """What can run now; None if nothing can before something else happens."""
        while ready := self._ready:
            self._ready = []
            may_cross = False
            if len(ready) == 1 and not ready[0].touches and not self._late:
                regions: Sequence[Region] = ready  # as most are
            else:
                regions, may_cross = self._gather(ready)
            entering: list[tuple[Edge, Any]] = []
            for region in regions:
                if region.entering:
                    entering += region.entering
                    region.entering = []
            if entering:
                return _new_tuple(Run, (regions, entering, may_cross))  # type: ignore[no-any-return]
            for region in regions:
                region.is_over = True
            self._close(regions)
        return None

    def _gather(self, ready: list[Region]) -> tuple[Sequence[Region], bool]:
        """The regions that run together, and whether some of their edges may lead into others."""
        regions = list(self._late)
        self._late = ()
        for region in ready:  # which grows meanwhile
            regions.append(region)
            for other in region.touches:
                other.waits -= 1
                if not other.waits:
                    ready.append(other)
        regions = self._without_late(regions)
        running = set(regions)
        return regions, any(not (other.is_over or other in running) for one in regions for other in one.touches)

    def _without_late(self, regions: list[Region]) -> list[Region]:
        """Keep back regions that no other worker waits for, until one of the regions they lead into runs.

        The engine need not be paused then at the border between the two.
        """
        running = set(regions)
        while True:
            late = [
                region
                for region in running
                if region.touches and region.entering and not region.recvs and region.touches.isdisjoint(running)
            ]
            if not late:
                return regions if len(running) == len(regions) else [one for one in regions if one in running]
            running.difference_update(late)
            self._late = [*self._late, *late]

    def post(self) -> list[tuple[int, Parcel]]:
        """What is to be told now, and to whom. Each parcel counts as unacknowledged, see `ride`.

        To be called when nothing more can run here before something else happens.
        """
        for peer in self._asked_by:
            if peer not in self.told:
                self._letter(peer)
        self._asked_by = ()
        for peer in self._strangers:
            self._letter(peer)
        if not self._outbox:
            return []
        outbox, self._outbox = self._outbox, {}
        told = self.told
        posted: list[tuple[int, Parcel]] = []
        for peer, (gradients, nones) in outbox.items():
            if peer in told:
                parcel = _new_tuple(Parcel, (gradients, False, nones, None, False))
            else:
                told.add(peer)
                self._strangers.discard(peer)
                parcel = _new_tuple(Parcel, (gradients, True, self._open(peer), self._asks(peer), False))
            posted.append((peer, parcel))
        self._unacknowledged += len(posted)
        return posted

    def _asks(self, peer: int) -> tuple[int, int] | None:
        waiting = self._unresolved.get(peer)
        return None if waiting is None or peer in self._heard else (len(waiting), max(waiting))

    def ride(self) -> None:
        """One of the parcels just posted goes with an answer, and so needs none itself."""
        self._unacknowledged -= 1

    def sent(self) -> None:
        """A parcel that was to go with an answer has been sent by itself after all."""
        self._unacknowledged += 1

    @property
    def is_done(self) -> bool:
        """Nothing is left to be done or waited for here, once what has been posted is under way."""
        return not (
            self._unacknowledged or self._unresolved or self._ready or self._counts or self._outbox or self._asked_by
        )

    # -- inner workings

    def _resolve(self, region: Region, gradients: Sequence[Any] | None) -> None:
        send = region.send
        assert send is not None  # the roots are no send
        if gradients is not None:
            self.used.append(region.message_id)
            feed = self._feed
            for edge, gradient in zip(send.edges, gradients, strict=True):
                if gradient is not None:
                    feed(region, edge, gradient)
        region.waits -= 1
        if not region.waits:
            self._ready.append(region)
        to = send.to
        if not self._unresolved[to]:
            del self._unresolved[to]
            self._strangers.discard(to)

    def _resolve_none(self, peer: int, message_ids: Iterable[int]) -> None:
        # The forward may go on meanwhile: nothing is known here, nor needed, of sends made since the pass began
        waiting = self._unresolved.get(peer)
        if waiting is not None:
            for message_id in message_ids:
                region = waiting.pop(message_id, None)
                if region is not None:
                    self._resolve(region, None)

    def _feed(self, region: Region, edge: Edge, gradient: Any) -> None:
        """A gradient enters at an edge of the send of a region."""
        node, place = edge
        owner = self._owners.get(node)
        if owner is not None:
            owner.entering.append((edge, gradient))
        elif node.__class__ is self._leaf_class:
            self._leaves.add(node.variable, gradient)
        elif node.record.retains_grad:
            region.entering.append((edge, gradient))  # the engine writes it to `.grad` where it captures it
        else:
            self._add_for_recv(node.record, place, gradient)

    def _add_for_recv(self, record: RecvRecord, place: int, gradient: Any) -> None:
        gradients = self._gradients.get(record)
        if gradients is None:
            if record.spent_by is not None and record.spent_by != self._pass_id:
                raise AutogradError(_FREED)
            gradients = self._gradients[record] = [None] * record.count
        before = gradients[place]
        gradients[place] = gradient if before is None else before + gradient

    def _close(self, regions: Iterable[Region]) -> None:
        """Regions are over: answer for recvs that no other region leads to."""
        counts = self._counts
        for region in regions:
            for record in region.recvs:
                left = counts[record] - 1
                if left:
                    counts[record] = left
                else:
                    del counts[record]
                    self._answer_for(record)

    def _answer_for(self, record: RecvRecord) -> None:
        sender, message_id = record.sender, record.message_id
        gradients = self._gradients.pop(record, None)
        if gradients is None:
            if sender == self._me:
                self._resolve_none(sender, (message_id,))
            else:
                self._letter(sender)[1].append(message_id)
            return
        if not self._retain_graph:
            record.spent_by = self._pass_id
        if sender == self._me:
            self._resolve(self._unresolved[sender].pop(message_id), gradients)
        else:
            self._letter(sender)[0].append((message_id, gradients))

    def _letter(self, peer: int) -> _Letter:
        letter = self._outbox.get(peer)
        if letter is None:
            letter = self._outbox[peer] = ([], [])
        return letter
