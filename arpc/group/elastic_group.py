"""An elastic group: workers join and leave at any time.

The keys, all under ``elastic/``: ``next_id`` counts up, ``id/<id>`` exists for every id that was given out,
``name/<name>`` holds the record of the worker that has the name, or `FREE`. ``event/<k>`` is a log without gaps of
joins and leaves, ``tail`` a lower bound of its length. ``name/<name>`` decides which worker has a name; the members are
read from the log, of which every worker reads only the new part.

A store that a worker serves ends with that worker; the group does not. Its address stands for the group: the other
workers return there, one of them serves a store again if it can, and each registers itself and all workers it knows
again. From then on ``used`` holds the ids that must not be given out any more. The first newcomer in a store, at an
address where there may have been another store before, waits a moment for such workers; ``founded`` exists once that is
over.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from functools import partial
from typing import Final

import msgspec

from arpc.errors import NameTakenError, RendezvousError
from arpc.group.group_store import GroupStore, KeyValues
from arpc.group.membership import (
    MIXED_TEXT,
    PRESENT_ELASTIC,
    PRESENT_STATIC,
    REOPEN_DELAY_S,
    Joined,
    Left,
    MakeRecord,
    Presence,
    Probe,
    Rendezvous,
    StaleRecordError,
    WorkerRecord,
    check_record,
    decode,
    decode_record,
    encode,
)
from arpc.ids import MAX_WORKER_ID, WorkerId
from arpc.log import get_logger

__all__ = ["ElasticRendezvous"]

logger = get_logger("arpc.rendezvous")

FREE: Final = b"\xc1free"
"""The value of a name whose worker has left. A deleted key would look like one that never existed."""

TAIL: Final = "elastic/tail"
NEXT_ID: Final = "elastic/next_id"
USED: Final = "elastic/used"
"""A bit for each id that was given out in an earlier store, the lowest first."""
FOUNDED: Final = "elastic/founded"
EVENTS_AT_ONCE: Final = 1024
TOKEN_BYTES: Final = 8
RETURN_LIMIT_S: Final = 3.0
"""How long `resolve` of an unknown worker waits for a lost store."""

_event_decoder: Final[msgspec.msgpack.Decoder[Joined | Left]] = msgspec.msgpack.Decoder(Joined | Left)


def allocate_id(kv: KeyValues, preferred: int | None) -> WorkerId:
    """Return an id that no worker of this group ever had: ``preferred`` if possible. Raises `RendezvousError`."""
    token = secrets.token_bytes(TOKEN_BYTES)
    for worker_id in _candidates(kv, preferred):
        if kv.swap(_id_key(worker_id), token) == token:
            return worker_id
    raise RendezvousError(
        f"all {MAX_WORKER_ID + 1} worker ids of this group were used, and none is used twice: start a new group"
    )


def _candidates(kv: KeyValues, preferred: int | None) -> Iterator[WorkerId]:
    """Yield ids that no worker had in an earlier store, to be tried one after the other."""
    used = int.from_bytes(kv.peek(USED) or b"", "little")
    if preferred is not None and not used >> preferred & 1:
        yield preferred
    if not used:
        while (worker_id := kv.add(NEXT_ID, 1) - 1) <= MAX_WORKER_ID:
            yield worker_id
        return
    # Some workers may still be on their way from the earlier store to this one, with ids that are not marked here yet.
    # Counting up would give out just those again; a random start hardly ever does.
    bits = f"{used:0{MAX_WORKER_ID + 1}b}"
    unused = [MAX_WORKER_ID - place for place, bit in enumerate(bits) if bit == "0"]
    first = secrets.randbelow(len(unused)) if unused else 0
    yield from unused[first:]
    yield from unused[:first]


def mark_used(kv: KeyValues, used: int) -> None:
    """Mark these ids, one for each bit, as used: no worker gets them any more."""
    before = kv.peek(USED) or b""
    while True:
        merged = used | int.from_bytes(before, "little")
        packed = merged.to_bytes((merged.bit_length() + 7) // 8, "little")
        found = before if packed == before else kv.swap(USED, packed, expected=before)
        if found == packed:
            return
        before = found


def append_event(kv: KeyValues, event: Joined | Left) -> int:
    """Append an event to the log; returns its place."""
    packed = encode(event)
    place = kv.count(TAIL)
    while kv.swap(f"elastic/event/{place}", packed) != packed:
        place += 1
    kv.set(TAIL, b"%d" % (place + 1))  # may step back when two workers write at once: it is only where to start looking
    return place


def read_events(kv: KeyValues, start: int) -> list[Joined | Left]:
    """Return the log from a place on. Takes one store operation if there is nothing new."""
    packed: list[bytes] = []
    while (event := kv.peek(f"elastic/event/{start + len(packed)}")) is not None:
        packed.append(event)
        first = start + len(packed)
        last = min(kv.count(TAIL), first + EVENTS_AT_ONCE)
        packed += kv.fetch([f"elastic/event/{place}" for place in range(first, last)])
    return [decode(event, _event_decoder) for event in packed]


class ElasticPresence(Presence):
    """The registration of one worker in the group. Its methods run in the store's thread, one after the other."""

    mine, others = PRESENT_ELASTIC, PRESENT_STATIC
    _record: WorkerRecord | None = None

    def _check_unmixed(self, kv: KeyValues) -> None:
        """Raise `RendezvousError` if a worker of the other kind came since the last check, or since `enter`."""
        if self.is_mixed(kv):
            raise RendezvousError(MIXED_TEXT)

    def take_name(self, kv: KeyValues, record: WorkerRecord, dead: bytes | None) -> bytes | int:
        """Join under the record's name if it is free, or still held by the worker of the packed record ``dead``.

        Returns this worker's place in the log; otherwise the packed record of the worker that has the name.
        """
        packed = encode(record)
        expected = dead or b""
        while (holder := kv.swap(_name_key(record), packed, expected=expected)) != packed:
            if holder != FREE:
                return holder
            expected, dead = FREE, None
        if dead is not None:
            append_event(kv, Left(decode_record(dead)))
            kv.add(PRESENT_ELASTIC, -1)
        self._record = record
        place = append_event(kv, Joined(record))
        self._check_unmixed(kv)
        return place

    def restore(
        self, kv: KeyValues, record: WorkerRecord, known: Iterable[WorkerRecord], used: int
    ) -> list[Joined | Left]:
        """Register this worker and all known ones in a new store after the old one was lost; returns the whole log.

        Entries that are in the store already take precedence: a worker that was given a name, or an id, in the meantime
        keeps it. So this worker is back if the log has its record, and was replaced if not.
        """
        self._be_counted(kv)
        self._record = record
        mark_used(kv, used)
        for one in (record, *known):
            self._bring_back(kv, one)
        return read_events(kv, 0)

    @staticmethod
    def _bring_back(kv: KeyValues, record: WorkerRecord) -> None:
        packed = encode(record)
        if kv.peek(_name_key(record)) is not None or kv.swap(_id_key(record.id), packed) != packed:
            return
        # another worker may do this at the same time: it is counted once, a second `Joined` of it changes nothing
        if kv.swap(_name_key(record), packed) == packed:
            if kv.add(f"elastic/restored/{record.id}", 1) == 1:
                kv.add(PRESENT_ELASTIC, 1)
            append_event(kv, Joined(record))

    def _give_up_place(self, kv: KeyValues) -> bool:
        if self._record is not None:
            packed = encode(self._record)
            if kv.peek(_name_key(self._record)) != packed:
                return False  # another worker took this one for dead
            # In this order: if this worker dies between the two, a dead worker has the name, which can be taken.
            append_event(kv, Left(self._record))
            kv.swap(_name_key(self._record), FREE, expected=packed)
        return True

    def news(self, kv: KeyValues, start: int) -> list[Joined | Left]:
        self._check_unmixed(kv)
        return read_events(kv, start)


def _name_key(record: WorkerRecord) -> str:
    return f"elastic/name/{record.name}"


def _id_key(worker_id: WorkerId) -> str:
    return f"elastic/id/{worker_id}"


class ElasticRendezvous(Rendezvous):
    """A `Rendezvous` of an elastic group. An id is used only once; a name can be used again after its worker left."""

    _presence: ElasticPresence

    def __init__(self, store: GroupStore) -> None:
        super().__init__(store)
        self._presence = ElasticPresence()
        self._joined_at = 0
        self._read_until = 0
        self._used = 0
        """A bit for each id that a worker of the group has, or had."""
        self._is_away = False
        """Whether the store was lost, and this worker has not registered in another yet."""
        self._found_again = asyncio.Event()
        """Set when this worker has registered in another store; there is a new event for each time."""

    async def _join_once(
        self, name: str, make_record: MakeRecord, probe: Probe | None, deadline: float, timeout_s: float
    ) -> WorkerRecord:
        presence = self._presence = ElasticPresence()
        self._begin_log([])
        await self._wait_for_earlier_group(deadline)
        if not await self._store.run(presence.enter):
            raise RendezvousError(MIXED_TEXT)
        worker_id = await self._store.run(partial(allocate_id, preferred=self._store.rank))
        record = check_record(make_record(worker_id), name, worker_id)
        dead: bytes | None = None
        while isinstance(found := await self._store.run(partial(presence.take_name, record=record, dead=dead)), bytes):
            holder = decode_record(found)
            if await self._is_alive(probe, holder, deadline):
                raise NameTakenError(
                    f"the name {name!r} is taken: worker {holder.name!r} (id {holder.id}) has it and has not left"
                )
            # await hazard: another newcomer may be faster, so the name is taken only if the dead worker still has it
            dead = found
        self._joined_at = found
        await self._catch_up()
        return record

    async def resolve(self, worker: str | WorkerId) -> WorkerRecord:
        try:
            return await super().resolve(worker)
        except RendezvousError as error:
            known = self._known(worker)
            if known is not None:
                raise StaleRecordError(str(error), known) from error
            if not await self._is_found_again():
                raise
        return await super().resolve(worker)

    async def changes(self, *, interval_s: float = 1.0) -> AsyncIterator[Joined | Left]:
        place = self._joined_at + 1
        while not self._has_left:
            try:
                events = await self._store.run(partial(self._presence.news, start=place))
            except RendezvousError as error:
                if self._has_left or not (self._store.is_lost and self._store.can_reopen):
                    raise
                logger.warning("worker %s goes back to where its store was: %s", self.record.name, error)
                await self._return()
                place = 0
                continue
            self._read(place, events)
            for event in events:
                place += 1
                yield event
            await self._store.pause(interval_s)

    def statistics(self) -> dict[str, int | str]:
        return {**super().statistics(), "events": self._read_until}

    async def _wait_for_earlier_group(self, deadline: float) -> None:
        """Give the workers of an earlier store at this address time to come back: their names are not free."""
        settle_s = self._store.access.settle_s
        if settle_s:
            settled_at = min(deadline, self._now() + settle_s)
            await self._store.poll(lambda kv: kv.peek(FOUNDED), deadline=settled_at)
            await self._store.run(lambda kv: kv.set(FOUNDED, b"1"))

    async def _return(self) -> None:
        """Register in another store, one that is there by now or that this worker serves; retries until it succeeds."""
        record = self.record
        self._is_away = True
        while True:
            try:
                await self._store.reopen(float("inf"))
                await self._store.run(self._check_open)
                presence = ElasticPresence()
                restore = partial(presence.restore, record=record, known=tuple(self._by_id.values()), used=self._used)
                events = await self._store.run(restore)
                break
            except RendezvousError as error:
                if self._has_left:
                    raise
                logger.debug("worker %s has not found its store again: %s", record.name, error)
                await asyncio.sleep(REOPEN_DELAY_S)
        self._presence = presence
        self._begin_log(events)
        self._is_away = False
        self._found_again.set()
        self._found_again = asyncio.Event()
        if self._by_name.get(record.name) == record:
            logger.info("worker %s is back in its group at %s", record.name, self._store.access.description)
        else:
            logger.error("worker %s (id %d) was taken for dead: others let it in no more", *record.info)

    async def _catch_up(self) -> None:
        """Read the new part of the log."""
        if self._is_away:
            raise RendezvousError(f"the store {self._store.access.description} was lost, and is not found again yet")
        start = self._read_until
        store = self._store.access
        events = await self._store.run(partial(read_events, start=start))
        if store is self._store.access:  # await hazard: otherwise the events are from a store that was lost since
            self._read(start, events)

    async def _is_found_again(self) -> bool:
        """Wait a moment until a lost store is found again; returns whether it was. Most are found at once."""
        if self._store.can_reopen and (self._is_away or self._store.is_lost):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETURN_LIMIT_S):
                    await self._found_again.wait()
        return not (self._is_away or self._store.is_lost)

    def _begin_log(self, events: Sequence[Joined | Left]) -> None:
        """Forget the members, and read them from the log of another store."""
        self._read_until = 0
        self._by_id.clear()
        self._by_name.clear()
        self._read(0, events)

    def _read(self, start: int, events: Sequence[Joined | Left]) -> None:
        """Apply a part of the log to the members; events that were read already are skipped."""
        for event in events[self._read_until - start :]:
            self._read_until += 1
            record = event.record
            if isinstance(event, Joined):
                self._by_id[record.id] = self._by_name[record.name] = record
                self._used |= 1 << record.id
            else:
                self._by_id.pop(record.id, None)
                if self._by_name.get(record.name) == record:
                    del self._by_name[record.name]
