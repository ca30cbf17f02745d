"""The state machine of a backward pass on one worker, without any I/O: events in, runs and parcels out.

Each worker that takes part has a `Plan` of its own graph. The pass ends there when every send is *resolved* (its
gradients have arrived, or are known never to arrive), every region has run, and the parcels to other workers are
acknowledged.

- Regions that are ready run together, or one slice after the other if they take long. When all regions that lead to a
  recv node have run, the worker that sent the message gets the sum of the gradients, or a note that there are none.
- The first parcel to a worker lists those of its sends that may still get gradients from here. So it knows that all its
  other sends to here get none, be they unused, still in flight, or lost.
- The first parcel to a worker from which no first parcel has arrived **asks**: it has the number of sends that wait for
  that worker. A worker where fewer are open sends its own first parcel at once, since an open one may wait for one that
  is not. Otherwise it will send its first parcel anyway.
- A worker with unresolved sends to a worker with which it has exchanged no first parcel sends one without gradients.
- Parcels and replies may overtake each other, so nothing is announced twice: the second announcement would deny what is
  in flight.

The first parcel that reaches a worker makes its sender the *parent*, which gets its reply when the pass is over there;
other parcels are answered at once. Replies may carry a parcel themselves, which needs no reply. So the pass as a whole
is over when it is over on the worker that began it (the scheme of Dijkstra and Scholten).

A pass always ends: a recv node waits only for messages that were sent after it arrived. So the messages of the forward
pass are resolved one by one, from the last to the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from operator import attrgetter
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from arpc.autograd.passes.messages import Parcel
from arpc.autograd.passes.plan import Edge, Plan, Region
from arpc.errors import AutogradError

__all__ = ["Captured", "PassProtocol", "Run", "Sums"]

Captured: TypeAlias = "Iterable[tuple[Edge, Any]]"
"""Gradients that a run computed, by the edges where they were caught; None where there is none."""
_FREED: Final = (
    "Trying to backward through the graph a second time, and the first pass has freed it. Pass retain_graph=True to "
    "the first `arpc.autograd.backward`"
)


_touches: Final = attrgetter("touches")


class Sums(Protocol):
    """Adds up gradients, by edges to leaves and recv nodes."""

    def add(self, edge: Edge, gradient: Any, /) -> None: ...

    def take_recv(self, node: Any, count: int, /) -> Sequence[Any] | None:
        """Take out the gradients of the tensors of a recv node, and return them; None if there are none."""


class Run(msgspec.Struct):
    """An instruction: run these regions with these gradients, and pass the captured ones to `PassProtocol.ran`."""

    regions: Sequence[Region]
    entering: Sequence[tuple[Edge, Any]]
    may_cross: bool
    """Whether edges may lead from these regions into others that must not run yet."""


class PassProtocol(msgspec.Struct, eq=False):
    """One pass on one worker. Gradients and nodes are opaque: gradients can be added, nodes are keys.

    ``announced_to`` and ``announced_by`` are not empty at first if workers exchanged first parcels with this one before
    it knew the context.
    """

    me: int
    plan: Plan
    sums: Sums
    pass_id: int = 0
    retain_graph: bool = False
    announced_to: set[int] = set()
    """The workers that a first parcel was sent to."""
    announced_by: set[int] = set()
    """The workers that a first parcel has arrived from."""
    used: list[int] = []
    """The message ids of the sends that got gradients."""
    _settled: list[Region] = []
    """Regions that wait for nothing any more, and are not over."""
    _late: list[Region] = []
    """Regions that could run, but wait for the first of the regions that they lead into."""
    _counts: dict[Any, int] = {}
    """For each recv node that may get gradients, the number of regions that lead to it and have not run."""
    _unresolved: dict[int, dict[int, Region]] = {}
    """The regions of unresolved sends, by the worker they were sent to and by message id."""
    _outbox: dict[int, Parcel] = {}
    """The parcels to be sent, by worker: gradients, and ``ids`` of sends that get none."""
    is_cut: bool = False
    """Whether regions are ready that the last run has left for the next one."""
    _asked_by: Sequence[int] = ()
    """Workers that have asked, and must get a first parcel at once."""
    _unacknowledged: int = 0

    def __post_init__(self) -> None:
        counts, unresolved, cutoff = self._counts, self._unresolved, self.plan.cutoff
        dead: list[Region] = []
        for region in self.plan.regions:
            for node in region.recvs:
                counts[node] = counts.get(node, 0) + 1
            send = region.send
            if send is None:
                self._settled.append(region)
            elif send.stamp > cutoff:
                dead.append(region)
            else:
                unresolved.setdefault(send.to, {})[region.message_id] = region
        if dead:
            self._settle_dead(dead)
        if (mine := unresolved.get(self.me)) is not None:
            live = set(self._open(self.me))
            self._resolve_some(self.me, [message_id for message_id in mine if message_id not in live])

    def _open(self, sender: int) -> list[int]:
        """Return the ids of a worker's messages whose tensors may still get gradients from here."""
        return [record.message_id for node in self._counts if (record := node.record).sender == sender]

    def _settle_dead(self, regions: list[Region]) -> None:
        """End regions that no gradient ever enters, before anything is announced."""
        for region in regions:  # the list grows meanwhile
            region.waits -= 1
            if region.waits:
                continue
            region.is_over = True
            regions += region.touches
            for node in region.recvs:
                self._counts[node] -= 1
                if not self._counts[node]:
                    del self._counts[node]

    # -- events

    def enter_roots(self, entering: Iterable[tuple[Edge, Any]]) -> None:
        """The pass begins here, with these gradients of the roots."""
        self._feed(self.plan.regions[-1], entering)

    def received(self, sender: int, parcel: Parcel) -> None:
        """A parcel has arrived. Raises `KeyError` with the message id of gradients for which there is no open send."""
        # Taken out, so that only the sums refer to the gradients that are kept
        gradients, parcel.gradients = parcel.gradients, []
        ids, asks, waiting = parcel.ids, parcel.asks, self._unresolved.get(sender)
        if asks is not None and sender not in self.announced_to:
            count, last = asks
            if sum([message_id <= last for message_id in self._open(sender)]) != count:
                self._asked_by = (*self._asked_by, sender)
        if parcel.is_first:
            self.announced_by.add(sender)
        if waiting is None:
            if gradients:
                raise KeyError(gradients[0][0])
            return
        for message_id, tensors in gradients:
            self._resolve(waiting.pop(message_id), tensors)
        if waiting and parcel.is_first:
            alive = set(ids)
            ids = [message_id for message_id in waiting if message_id not in alive]
        if not waiting:
            del self._unresolved[sender]
        elif ids:
            self._resolve_some(sender, ids)

    def ran(self, run: Run, captured: Captured) -> None:
        """Regions have run."""
        add, owners = self.sums.add, self.plan.owners if run.may_cross else ()
        for edge, gradient in captured:
            if gradient is None:
                continue
            if edge[0] in owners and not (owner := self.plan.owners[edge[0]]).is_over:
                owner.entering.append((edge, gradient))
            else:
                add(edge, gradient)
        self._close(run.regions)

    def sent(self) -> None:
        """A parcel has been sent by itself, and not with a reply: it will be acknowledged."""
        self._unacknowledged += 1

    def acknowledged(self) -> None:
        """One of this worker's parcels has been answered."""
        self._unacknowledged -= 1

    # -- instructions

    def next_run(self, most_nodes: float = inf) -> Run | None:
        """Return the regions to run now; None if nothing can run before the next event.

        Of regions that do not lead into each other, only the first that together have ``most_nodes`` nodes: see
        `is_cut`. Their gradients can be posted while the others run.
        """
        self.is_cut = False
        while regions := self._settled:
            self._settled, self.is_cut = [], False
            may_cross = False
            if len(regions) > 1 or regions[0].touches or self._late:
                regions, may_cross = self._gather(regions)
                regions = self._cut(regions, most_nodes)
            entering: list[tuple[Edge, Any]] = []
            for region in regions:
                region.is_over = True
                entering += region.entering
                region.entering = []
            if entering:
                return Run(regions, entering, may_cross)
            self._close(regions)
        return None

    def _gather(self, settled: list[Region]) -> tuple[list[Region], bool]:
        """Return the regions that run together, and whether some of their edges may lead into others."""
        regions, self._late = self._late, []
        for region in settled:  # the list grows meanwhile
            regions.append(region)
            for other in region.touches:
                other.waits -= 1
                if not other.waits:
                    settled.append(other)
        regions = self._without_late(regions)
        running = set(regions)
        return regions, any(not (other.is_over or other in running) for one in regions for other in one.touches)

    def _cut(self, regions: list[Region], most_nodes: float) -> list[Region]:
        """Return the first regions, with that many nodes, and leave the others for the next run; or all of them."""
        size = 0
        for number, region in enumerate(regions, start=1):
            size += region.size
            if size >= most_nodes and number < len(regions):
                if any(map(_touches, regions)):
                    return regions
                self.is_cut = True
                self._settled = regions[number:] + self._settled
                return regions[:number]
        return regions

    def _without_late(self, regions: list[Region]) -> list[Region]:
        """Hold back regions that no other worker waits for, until one of the regions they lead into runs.

        So the engine need not be paused at the border between the two. Returns the other regions.
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
            self._late += late

    def post(self) -> list[tuple[int, Parcel]]:
        """Return the parcels to send now, with their destinations. One is sent with a reply or by itself, see `sent`.

        To be called when nothing more can run here before the next event, or the next run `is_cut` off.
        """
        announced_to, outbox = self.announced_to, self._outbox
        for peer in self._asked_by:
            if peer not in announced_to and peer not in outbox:
                outbox[peer] = Parcel()
        self._asked_by = ()
        for peer in self._unresolved:
            if not (peer in announced_to or peer in self.announced_by or peer in outbox or peer == self.me):
                outbox[peer] = Parcel()
        if not outbox:
            return []
        self._outbox = {}
        for peer, parcel in outbox.items():
            if peer not in announced_to:
                announced_to.add(peer)
                # a first parcel lists the sends that may still get gradients; all others get none
                parcel.is_first, parcel.ids = True, self._open(peer)
                if peer in self._unresolved and peer not in self.announced_by:
                    waiting = self._unresolved[peer]
                    parcel.asks = len(waiting), max(waiting)
        return [*outbox.items()]

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do or to wait for here, once the parcels that `post` has returned are sent."""
        # A region that has not run waits for an unresolved send, and no late one leads to a recv node
        return not (self._unacknowledged or self._unresolved or self._counts)

    # -- inner workings

    def _resolve(self, region: Region, gradients: Sequence[Any] | None) -> None:
        """Give a send, already taken out of `_unresolved`, its gradients; None if it gets none."""
        if gradients is not None:
            self.used.append(region.message_id)
            self._feed(region, zip(region.send.edges, gradients, strict=True))  # type: ignore[union-attr]  # no root
        region.waits -= 1
        if not region.waits:
            self._settled.append(region)

    def _resolve_some(self, peer: int, ids: Iterable[int], gradients: Sequence[Any] | None = None) -> None:
        """Give messages that were sent to a worker these gradients; None if they get none."""
        # The forward may go on meanwhile: sends made since the pass began are not known here, nor needed
        waiting = self._unresolved.get(peer)
        if waiting is not None:
            for message_id in ids:
                region = waiting.pop(message_id, None)
                if region is not None:
                    self._resolve(region, gradients)
            if not waiting:
                del self._unresolved[peer]

    def _feed(self, region: Region, entering: Iterable[tuple[Edge, Any]]) -> None:
        """Let gradients enter at the edges of the send of a region, or of the roots."""
        owners, recvs, add = self.plan.owners, region.recvs, self.sums.add
        for edge, gradient in entering:
            if gradient is None:
                continue
            node = edge[0]
            if node in owners:
                owners[node].entering.append((edge, gradient))
            elif node in recvs and node.record.retains_grad:
                region.entering.append((edge, gradient))  # the engine writes it to `.grad` where it captures it
            else:
                add(edge, gradient)

    def _close(self, regions: Iterable[Region]) -> None:
        """End regions, and answer for recv nodes that no other region leads to any more."""
        counts = self._counts
        for region in regions:
            for node in region.recvs:
                if counts[node] > 1:
                    counts[node] -= 1
                else:
                    del counts[node]
                    self._answer_for(node)

    def _answer_for(self, node: Any) -> None:
        """Give the sender of a message the gradients of its tensors, or a note that there are none.

        Raises `AutogradError` if an earlier pass has freed the graph.
        """
        record = node.record
        sender, message_id = record.sender, record.message_id
        gradients = self.sums.take_recv(node, record.count)
        if gradients is not None:
            if record.spent_by is not None and record.spent_by != self.pass_id:
                raise AutogradError(_FREED)
            if not self.retain_graph:
                record.spent_by = self.pass_id
        if sender == self.me:
            self._resolve_some(sender, (message_id,), gradients)
            return
        parcel = self._outbox.get(sender)
        if parcel is None:
            parcel = self._outbox[sender] = Parcel()
        if gradients is None:
            parcel.ids.append(message_id)
        else:
            parcel.gradients.append((message_id, gradients))
