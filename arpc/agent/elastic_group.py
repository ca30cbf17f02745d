"""An elastic group: workers join and leave at any time.

The keys, all under ``elastic/``: ``next_id`` counts up, ``id/<id>`` is there for every id that was given out,
``name/<name>`` holds the record of the worker that has the name, or `FREE`. ``event/<k>`` is a log without gaps of who
joined and left, ``tail`` a lower bound of its length. Who has a name is decided by ``name/<name>``; who is in the group
is read from the log, of which every worker reads only what is new to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Final

import msgspec

from arpc.agent.group_store import GroupStore, KeyValues
from arpc.agent.membership import (
    MIXED,
    MIXED_TEXT,
    PRESENT_ELASTIC,
    PRESENT_STATIC,
    Joined,
    Left,
    MakeRecord,
    Probe,
    Rendezvous,
    WorkerRecord,
    check_record,
    decode,
    decode_record,
    encode,
    unknown_worker,
)
from arpc.errors import NameTakenError, RendezvousError
from arpc.ids import MAX_WORKER_ID, WorkerId

__all__ = ["ElasticRendezvous"]

FREE: Final = b"\xc1free"
"""The value of a name whose worker has left. A key that was deleted could not be told from one that never was."""

TAIL: Final = "elastic/tail"
EVENTS_AT_ONCE: Final = 1024

_event_decoder: Final[msgspec.msgpack.Decoder[Joined | Left]] = msgspec.msgpack.Decoder(Joined | Left)


def allocate_id(kv: KeyValues, wish: int | None) -> WorkerId:
    """An id that no worker of this store ever had: the wanted one if possible, else the next."""
    if wish is not None and kv.add(f"elastic/id/{wish}", 1) == 1:
        return wish
    while True:
        worker_id = kv.add("elastic/next_id", 1) - 1
        if worker_id > MAX_WORKER_ID:
            raise RendezvousError(
                f"all {MAX_WORKER_ID + 1} worker ids of this group were used, and none is used twice: start a new group"
            )
        if kv.add(f"elastic/id/{worker_id}", 1) == 1:  # else it was a wish
            return worker_id


def append_event(kv: KeyValues, event: Joined | Left) -> int:
    """Write to the end of the log; the place where it stands."""
    packed = encode(event)
    place = kv.count(TAIL)
    while kv.swap(f"elastic/event/{place}", packed) != packed:
        place += 1
    kv.set(TAIL, b"%d" % (place + 1))  # may step back when two write at once: it is where to start looking, no more
    return place


def read_events(kv: KeyValues, start: int) -> list[Joined | Left]:
    """The log from a place on. One operation if there is nothing new."""
    packed: list[bytes] = []
    while (event := kv.peek(f"elastic/event/{start + len(packed)}")) is not None:
        packed.append(event)
        first = start + len(packed)
        last = min(kv.count(TAIL), first + EVENTS_AT_ONCE)
        packed += kv.fetch([f"elastic/event/{place}" for place in range(first, last)])
    return [decode(event, _event_decoder) for event in packed]


class Stay:
    """One worker's time in the group. Its steps run in the store's thread, one after the other."""

    def __init__(self) -> None:
        self._record: WorkerRecord | None = None
        self._mixed_before = 0
        self._is_present = False

    def enter(self, kv: KeyValues) -> None:
        self._mixed_before = kv.count(MIXED)
        self._is_present = True
        kv.add(PRESENT_ELASTIC, 1)
        # Either kind first says that it is there and then looks for the other, so of two at least one sees the other.
        if kv.count(PRESENT_STATIC) > 0:
            kv.add(MIXED, 1)
        self.check_unmixed(kv)

    def check_unmixed(self, kv: KeyValues) -> None:
        """Complain, once, of each worker of the other kind that came since `enter`."""
        mixed = kv.count(MIXED)
        if mixed != self._mixed_before:
            self._mixed_before = mixed
            raise RendezvousError(MIXED_TEXT)

    def take_name(self, kv: KeyValues, record: WorkerRecord, dead: bytes | None) -> bytes | int:
        """Join under the record's name if it is free, or held by that dead worker still; our place in the log.

        Otherwise the packed record of who has the name.
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
        self.check_unmixed(kv)
        return place

    def leave(self, kv: KeyValues) -> None:
        if not self._is_present:
            return
        self._is_present = False
        if self._record is not None:
            packed = encode(self._record)
            if kv.peek(_name_key(self._record)) != packed:
                return  # who took this worker for dead has done all that follows
            # In this order: if we die between the two, the name is that of a dead worker, which can be taken.
            append_event(kv, Left(self._record))
            kv.swap(_name_key(self._record), FREE, expected=packed)
        kv.add(PRESENT_ELASTIC, -1)

    def news(self, kv: KeyValues, start: int) -> list[Joined | Left]:
        self.check_unmixed(kv)
        return read_events(kv, start)


def _name_key(record: WorkerRecord) -> str:
    return f"elastic/name/{record.name}"


class ElasticRendezvous(Rendezvous):
    """A `Rendezvous` without a size. An id is used once, a name again and again."""

    def __init__(self, store: GroupStore) -> None:
        super().__init__(store)
        self._stay = Stay()
        self._joined_at = 0
        self._read_until = 0
        self._by_id: dict[WorkerId, WorkerRecord] = {}
        self._by_name: dict[str, WorkerRecord] = {}

    async def _join_once(
        self, name: str, make_record: MakeRecord, probe: Probe | None, deadline: float, timeout_s: float
    ) -> WorkerRecord:
        stay = self._stay = Stay()
        self._read_until = 0
        self._by_id.clear()
        self._by_name.clear()
        try:
            await self._store.run(self._check_open)
            await self._store.run(stay.enter)
            worker_id = await self._store.run(partial(allocate_id, wish=self._store.rank))
            record = check_record(make_record(worker_id), name, worker_id)
            dead: bytes | None = None
            while isinstance(found := await self._store.run(partial(stay.take_name, record=record, dead=dead)), bytes):
                holder = decode_record(found)
                if await self._is_alive(probe, holder, deadline):
                    raise NameTakenError(
                        f"the name {name!r} is taken: worker {holder.name!r} (id {holder.id}) has it and has not left"
                    )
                # await hazard: another newcomer may be faster, so the name is taken only if it is still the dead's
                dead = found
            self._joined_at = found
            await self._catch_up()
        except BaseException as error:
            await self._withdraw(error)
            raise
        return record

    async def members(self) -> tuple[WorkerRecord, ...]:
        await self._catch_up()
        return tuple(self._by_id[worker_id] for worker_id in sorted(self._by_id))

    async def resolve(self, worker: str | WorkerId) -> WorkerRecord:
        await self._catch_up()
        record = self._by_name.get(worker) if isinstance(worker, str) else self._by_id.get(worker)
        if record is None:
            raise unknown_worker(worker, self._by_id.values())
        return record

    async def gather(self, tag: str, value: bytes, *, timeout_s: float) -> dict[WorkerId, bytes]:
        return {self.record.id: value}

    async def awaited(self, every_s: float) -> tuple[WorkerRecord, ...]:
        return ()

    async def fail_gather(self, text: str) -> None:
        """There is none: nobody is waited for."""

    async def changes(self, *, interval_s: float = 1.0) -> AsyncIterator[Joined | Left]:
        place = self._joined_at + 1
        while not self._has_left:
            for event in await self._store.run(partial(self._stay.news, start=place)):
                place += 1
                yield event
            await asyncio.sleep(interval_s)

    def statistics(self) -> dict[str, int | str]:
        return {**super().statistics(), "members": len(self._by_id), "events": self._read_until}

    async def _catch_up(self) -> None:
        """Read the part of the log that is new."""
        start = self._read_until
        events = await self._store.run(partial(read_events, start=start))
        # await hazard: another call may have read the same part, or more
        for event in events[self._read_until - start :]:
            self._read_until += 1
            record = event.record
            if isinstance(event, Joined):
                self._by_id[record.id] = self._by_name[record.name] = record
            else:
                self._by_id.pop(record.id, None)
                if self._by_name.get(record.name) == record:
                    del self._by_name[record.name]

    def _undo(self, kv: KeyValues) -> None:
        self._stay.leave(kv)
