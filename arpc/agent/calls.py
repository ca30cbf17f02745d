"""Calls on their way: id to future, by deadline, for one peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from operator import length_hint
from typing import Any, Final, Protocol

import msgspec

from arpc.agent.deadlines import NEVER, Deadlines
from arpc.agent.functions import name_of
from arpc.agent.streams import ItemOrder
from arpc.transport.base import BulkSend, Connection

__all__ = ["LAST_NUMBER", "SEQUENCE_BITS", "Call", "Calls", "Recipient"]

SEQUENCE_BITS: Final = 24
# Those of `turn` have the upper half of the numbers, those of `add` the lower
_TURN: Final = 1 << (SEQUENCE_BITS - 1)
_ADD_MASK: Final = _TURN - 1
_MANY: Final = _TURN >> 1
LAST_NUMBER: Final = _TURN - 1


class Recipient(Protocol):
    """Who hears how a call has ended, once: a future, or what does with less than one until somebody waits."""

    def done(self) -> bool: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, exception: Exception, /) -> None: ...


class Call(msgspec.Struct, gc=False):
    """One call that has not ended.

    Not tracked by the garbage collector: a hundred thousand of them would keep it busy.
    """

    future: Recipient
    function: Any
    size_bytes: int
    """What it takes of the window; 0 for one so small that it is not counted."""
    connection: Connection | None = None
    """What it was sent on; None while it waits to be sent."""
    is_private: bool = False
    """Its future is one of asyncio's that a single task waits for, and nobody else can see."""
    bulk: BulkSend | None = None
    items: ItemOrder | None = None
    """Takes the items of a stream."""
    sent_at: float = 0.0
    """When it was sent, if that is looked at."""
    is_waiting: bool = False
    """It is in the backlog of its peer, and has not been given up."""

    @property
    def name(self) -> str:
        return name_of(self.function)


class Calls:
    """The calls made to one peer.

    An id is ``tick << 24 | number``, so the table of pending calls is the timer wheel too. Most calls have the default
    timeout, and hundreds share a tick: for those there is `bucket`, whose ids `next_id` gives out one after another,
    until `until`. Who is in a hurry looks at that himself; `take_id` is for all others.
    """

    def __init__(
        self,
        deadlines: Deadlines,
        timed_out: Callable[[int, Call], None],
        abandon: Callable[[int, Call], None] = lambda _, __: None,
    ) -> None:
        self._deadlines = deadlines
        self._timed_out = timed_out
        self._abandon = abandon
        self.buckets: dict[int, dict[int, Call]] = {}
        self.tick = -1
        """The one that `bucket` is for."""
        self.bucket: dict[int, Call] = {}
        self.until = 0.0
        """Up to when `bucket` is that of a call with the default timeout; 0 if it is another. Set by the caller."""
        self._made_before = 0
        self._old: set[int] = set()
        """Ticks whose calls have numbers of an earlier round."""
        self._ids = iter(range(LAST_NUMBER))
        self.next_id = self._ids.__next__
        """The next id of `bucket`. Raises StopIteration when they have run out: `turn` begins again."""
        self._numbers = count(1)

    @property
    def made(self) -> int:
        """How many there have been."""
        return self._made_before + self._taken

    @property
    def _taken(self) -> int:
        """How many of the numbers of this round are taken."""
        return LAST_NUMBER - length_hint(self._ids)

    def take_id(self, tick: int) -> int:
        """The next id, and let `bucket` be that of the tick."""
        if tick != self.tick:
            self.turn(tick)
        try:
            return self.next_id()
        except StopIteration:
            self.turn(tick)
            return self.next_id()

    def turn(self, tick: int) -> None:
        """Let `bucket` be that of another tick, or begin again with the numbers of this one."""
        taken = self._taken
        if taken > _MANY:  # before they run out
            self._made_before += taken
            taken = 0
            self._old = {old for old, bucket in self.buckets.items() if bucket}
        # A call that waits for hours may have any number by now: keep away from it, at the price of a tick or two
        place = tick
        while place in self._old:
            place += 1
        self.tick = tick
        self.until = 0.0
        self.bucket = self._bucket(place, is_watched=tick != NEVER)
        base = place << SEQUENCE_BITS | _TURN
        self._ids = iter(range(base + taken, base + LAST_NUMBER))
        self.next_id = self._ids.__next__

    def _bucket(self, tick: int, *, is_watched: bool) -> dict[int, Call]:
        bucket = self.buckets.get(tick)
        if bucket is None:
            bucket = self.buckets[tick] = {}
            if is_watched:
                self._deadlines.watch(tick, self)
        return bucket

    def add(self, tick: int, call: Call) -> int:
        """Keep a call of any tick."""
        bucket = self.buckets.get(tick)
        if bucket is None:
            bucket = self._bucket(tick, is_watched=tick != NEVER)
        self._made_before += 1
        call_id = tick << SEQUENCE_BITS | next(self._numbers) & _ADD_MASK
        while call_id in bucket:  # eight million later, one of them still waits
            call_id = tick << SEQUENCE_BITS | next(self._numbers) & _ADD_MASK
        bucket[call_id] = call
        return call_id

    def pop(self, call_id: int) -> Call | None:
        bucket = self.buckets.get(call_id >> SEQUENCE_BITS)
        return bucket.pop(call_id, None) if bucket is not None else None

    def get(self, call_id: int) -> Call | None:
        bucket = self.buckets.get(call_id >> SEQUENCE_BITS)
        return bucket.get(call_id) if bucket is not None else None

    def expire(self, tick: int) -> None:
        expired = self.buckets.pop(tick, {})
        if expired is self.bucket:
            self.tick = -1
            self.until = 0.0
            self.bucket = {}  # the old one holds the futures of what has expired until the next call is made
        for call_id, call in expired.items():
            self._timed_out(call_id, call)
        # Only now: what one of them gives back must not be used to send another
        for call_id, call in expired.items():
            self._abandon(call_id, call)

    def clear(self) -> None:
        """Forget all calls."""
        self.buckets.clear()
        self.bucket = {}
        self.tick = -1
        self.until = 0.0

    def __iter__(self) -> Iterator[tuple[int, Call]]:
        for bucket in list(self.buckets.values()):
            yield from list(bucket.items())

    def __len__(self) -> int:
        return sum(map(len, self.buckets.values()))
