"""The members of the group, as one worker knows them: a state machine of its observations, and streams of events.

Each worker, by its name, is *present*, *suspected* (its connection broke or it fell silent; this worker tries to
reconnect), *lost*, or has *left*. An observation becomes at most two events, which all streams get in the same order.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from time import monotonic
from typing import Final, Self
from weakref import WeakSet

from arpc.ids import WorkerInfo

__all__ = [
    "MemberEvent",
    "MemberJoined",
    "MemberLeft",
    "MemberLost",
    "MemberReturned",
    "MemberStream",
    "MemberSuspected",
    "Roster",
]

_BUFFERED: Final = 1024
"""The events that a stream buffers, more for many workers. After that, only each worker's last one is kept."""
_WORKERS: Final = 65_536
"""The workers that a stream keeps an event of: names may come and go for ever while events are not taken."""
REMEMBERED: Final = 256
"""The number of gone workers that are remembered as gone, and as returned if they come back."""
REMEMBERED_S: Final = 60.0
"""How long each is remembered at least: after that, no message in flight names it, and all retries have ended."""


@dataclass(frozen=True, slots=True)
class MemberEvent:
    """A change of another worker of the group: one of the classes below."""

    worker: WorkerInfo
    incarnation: int
    """The number of this start of the worker: another process has another one, even under the same name."""


@dataclass(frozen=True, slots=True)
class MemberJoined(MemberEvent):
    """The worker joined the group, or was in it already when the stream began."""


@dataclass(frozen=True, slots=True)
class MemberSuspected(MemberEvent):
    """The worker's connection broke, or it fell silent. Calls in flight to it have failed; a reconnect is tried."""

    reason: str


@dataclass(frozen=True, slots=True)
class MemberReturned(MemberEvent):
    """The worker can be reached again. ``is_new``: as another process, without the state of its predecessor."""

    is_new: bool


@dataclass(frozen=True, slots=True)
class MemberLost(MemberEvent):
    """The worker died, or was silent for `RpcOptions.rref_grace` seconds. The RRefs that it held are released."""

    reason: str


@dataclass(frozen=True, slots=True)
class MemberLeft(MemberEvent):
    """The worker was shut down, and announced it."""


class _Standing(Enum):
    PRESENT = auto()
    SUSPECTED = auto()
    LOST = auto()
    LEFT = auto()


_GONE: Final = (_Standing.LOST, _Standing.LEFT)


@dataclass(slots=True)
class _Member:
    worker: WorkerInfo
    incarnation: int
    standing: _Standing


class Roster:
    """One worker's knowledge of the others. ``changed`` is called with each event, after all streams got it."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._gone: OrderedDict[str, float] = OrderedDict()
        """The time when each gone worker went, the oldest first."""
        self._streams: WeakSet[MemberStream] = WeakSet()
        self.changed: Callable[[MemberEvent], None] = lambda _: None
        self.forget: Callable[[WorkerInfo], bool] = lambda _: True
        """Called before a gone worker is forgotten: if it returns False, the worker is kept for the time being."""
        self._is_closed = False

    # -- observations

    def seen(self, worker: WorkerInfo, incarnation: int) -> None:
        """Record that a worker is present: it is in the group, or connected."""
        member = self._members.get(worker.name)
        if member is None:
            self._members[worker.name] = _Member(worker, incarnation, _Standing.PRESENT)
            self._publish(MemberJoined(worker, incarnation))
            return
        is_new = member.incarnation != incarnation
        if not is_new and member.standing is _Standing.PRESENT:
            return
        if is_new and member.standing not in _GONE:
            self._publish(MemberLost(member.worker, member.incarnation, "another has come under its name"))
        member.worker, member.incarnation, member.standing = worker, incarnation, _Standing.PRESENT
        self._gone.pop(worker.name, None)
        self._publish(MemberReturned(worker, incarnation, is_new))

    def suspected(self, worker: WorkerInfo, reason: str) -> None:
        """Record that the connection to a worker broke."""
        member = self._present(worker)
        if member is not None and member.standing is _Standing.PRESENT:
            member.standing = _Standing.SUSPECTED
            self._publish(MemberSuspected(member.worker, member.incarnation, reason))

    def lost(self, worker: WorkerInfo, reason: str) -> None:
        """Record that a worker was given up."""
        member = self._present(worker)
        if member is not None:
            self._end(member, _Standing.LOST)
            self._publish(MemberLost(member.worker, member.incarnation, reason))

    def left(self, worker: WorkerInfo) -> None:
        """Record that a worker sent GOODBYE, or left the group."""
        member = self._present(worker)
        if member is not None:
            self._end(member, _Standing.LEFT)
            self._publish(MemberLeft(member.worker, member.incarnation))

    def _present(self, worker: WorkerInfo) -> _Member | None:
        """Return the member, if it is this very worker and not gone: an event of its predecessor changes nothing."""
        member = self._members.get(worker.name)
        if member is None or member.worker != worker or member.standing in _GONE:
            return None
        return member

    def _end(self, member: _Member, standing: _Standing) -> None:
        member.standing = standing
        now = monotonic()
        self._gone[member.worker.name] = now
        # two for each one added, so that all are forgotten in the end, even if `forget` has kept some of them
        for _ in range(min(2, len(self._gone) - REMEMBERED)):
            oldest, gone_at = next(iter(self._gone.items()))
            if now - gone_at < REMEMBERED_S:
                break
            if self.forget(self._members[oldest].worker):
                del self._gone[oldest], self._members[oldest]
            else:
                self._gone[oldest] = now
                self._gone.move_to_end(oldest)

    # -- listeners

    def _publish(self, event: MemberEvent) -> None:
        if self._is_closed:
            return
        for stream in list(self._streams):
            stream.add(event)
        self.changed(event)

    @property
    def has_open_streams(self) -> bool:
        """Whether there is a stream that has not ended."""
        return any(not stream.is_ended for stream in self._streams)

    def stream(self) -> MemberStream:
        """Return a stream of all events from now on, after a `MemberJoined` for each worker that is not gone."""
        made = MemberStream(
            [
                MemberJoined(member.worker, member.incarnation)
                for member in self._members.values()
                if member.standing not in _GONE
            ]
        )
        if self._is_closed:
            made.end()
        else:
            self._streams.add(made)
        return made

    def close(self) -> None:
        """End all streams, once the events in them have been taken."""
        self._is_closed = True
        for stream in list(self._streams):
            stream.end()

    def statistics(self) -> dict[str, int]:
        standings = [member.standing for member in self._members.values()]
        return {standing.name.lower(): standings.count(standing) for standing in _Standing}


class MemberStream:
    """``async for event in worker.membership():``, see `Worker.membership`. One task at a time may wait for it."""

    def __init__(self, events: list[MemberEvent]) -> None:
        self._events = deque(events)
        self._most = max(_BUFFERED, 2 * len(events))
        self._is_ended = False
        self._changed = asyncio.Event()
        self._is_awaited = False
        self.dropped = 0
        """The number of events that were left out, because they were out of date before the listener took them."""

    def add(self, event: MemberEvent) -> None:
        if self._is_ended:
            return
        self._events.append(event)
        if len(self._events) > self._most:
            self._drop_what_is_out_of_date()
        self._changed.set()

    def _drop_what_is_out_of_date(self) -> None:
        latest = {event.worker.name: event for event in self._events}
        kept = [event for event in self._events if latest[event.worker.name] is event][-_WORKERS:]
        self._most = max(_BUFFERED, 2 * len(kept))  # so that not every further event searches all of them again
        self.dropped += len(self._events) - len(kept)
        self._events = deque(kept)

    @property
    def is_ended(self) -> bool:
        """Whether the stream has ended, except for events that were received and not yet taken."""
        return self._is_ended

    def end(self) -> None:
        self._is_ended = True
        self._changed.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> MemberEvent:
        while not self._events:
            if self._is_ended:
                raise StopAsyncIteration
            if self._is_awaited:
                raise RuntimeError("another task is waiting for this stream: let each have one of its own")
            self._changed.clear()
            self._is_awaited = True
            try:
                await self._changed.wait()
            finally:
                self._is_awaited = False
        return self._events.popleft()

    async def aclose(self) -> None:
        """End the stream. To drop it has the same effect."""
        self._events.clear()
        self.end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
