"""A group of fixed size: complete from the start, and the same until its end.

Groups may follow one another in one store. The k-th is *generation* k: a rank takes part in the first generation that
it has not ended yet, so all ranks agree on the number without exchanging messages.

The keys, all under ``static/``: ``ended/<rank>`` counts the generations that this rank has ended. In generation g,
``<g>/start/...`` is the round that gathers the records, ``<g>/name/<name>`` holds the rank that has a name,
``<g>/size`` the size of the group, ``<g>/dead/<rank>`` exists for a worker that another one found dead,
``<g>/gather/<tag>.<k>/...`` are the rounds of `gather`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Final

from arpc.errors import ConfigurationError, RendezvousError
from arpc.group.group_store import GroupStore, KeyValues, deadline_after
from arpc.group.membership import (
    MIXED_TEXT,
    PRESENT_ELASTIC,
    PRESENT_STATIC,
    MakeRecord,
    Presence,
    Probe,
    Rendezvous,
    WorkerRecord,
    check_record,
    decode_record,
    encode,
    leave_closing_store,
    listed,
)
from arpc.group.store_allgather import Failed, FailureKind, Outcome, Round
from arpc.ids import WorkerId

__all__ = ["StaticRendezvous"]

FAILURE_IS_NEWS_S: Final = 30.0
"""A start that failed longer ago is over: a worker that joins now is meant for the next one."""


class StaticPresence(Presence):
    """The place of one worker in one generation. Its methods run in the store's thread, one after the other."""

    mine, others = PRESENT_STATIC, PRESENT_ELASTIC

    def __init__(self, record: WorkerRecord, size: int, timeout_s: float) -> None:
        super().__init__()
        self.record = record
        self._packed = encode(record)
        self._size = size
        self._timeout_s = timeout_s
        self._is_mine = False
        self._is_settled = False
        self._set_generation(0)

    def _set_generation(self, generation: int) -> None:
        self.generation = generation
        self.start = Round(self._key("start"), self.record.id, self._size, self._describe)

    def take(self, kv: KeyValues) -> WorkerRecord | Failed | None:
        """Register this worker under its rank.

        Returns None; the record of another worker that has the rank; or the reason why there will be no group.
        """
        self._is_mine = self._is_settled = False
        self._find_generation(kv)
        if not self.enter(kv):
            return self._fail(kv, "other", MIXED_TEXT)
        rank = self.record.id
        holder = kv.peek(self.start.value_key(rank))
        has_arrived = holder == self._packed  # in an earlier attempt, at a closing store that stayed after all
        if holder is None:
            holder = kv.swap(self.start.value_key(rank), self._packed)
        self._is_mine = holder == self._packed
        if not self._is_mine:
            return decode_record(holder)
        size = int(kv.swap(self._key("size"), b"%d" % self._size))
        if size != self._size:
            text = f"worker {self.record.name!r} (rank {rank}) has world_size={self._size}, others have {size}"
            return self._fail(kv, "other", text)
        named = int(kv.swap(self._key(f"name/{self.record.name}"), b"%d" % rank))
        if named != rank:
            text = f"two workers have the name {self.record.name!r}: rank {named} and rank {rank}"
            return self._fail(kv, "name", text)
        if not has_arrived:
            self.start.arrive(kv)
        return None

    def look(self, kv: KeyValues) -> Outcome | None:
        """Return the outcome of the start, None if there is none yet. Raises `RendezvousError` for a closing store."""
        if self.is_mixed(kv):
            outcome: Outcome | None = self.start.settle(kv, Failed.now("other", MIXED_TEXT))
        else:
            outcome = self.start.outcome(kv)
        self._is_settled = outcome is not None
        if outcome is None and kv.is_closing():
            # This is the store of the previous group, and its host waits for this worker to leave.
            self._is_mine = False
            self.leave(kv)
            leave_closing_store(kv)
        return outcome

    def dispute(self, kv: KeyValues, holder: WorkerRecord) -> Failed:
        """Fail the start for all workers that wait: two workers have this rank."""
        text = (
            f"rank {holder.id} was given to two workers: {holder.name!r} has it, {self.record.name!r} wants it too. "
            f"If {holder.name!r} was killed, start the group with a fresh store or file"
        )
        return self._fail(kv, "name", text)

    def end_for_dead(self, kv: KeyValues, holder: WorkerRecord) -> None:
        """End this generation in place of a worker that died in it; the next `take` finds the next one."""
        self._fail(kv, "other", f"worker {holder.name!r} (rank {holder.id}) died before the group was complete")
        self._end_generation(kv)
        if kv.swap(self._key(f"dead/{holder.id}"), self._packed) == self._packed:  # of two that do this, one counts
            kv.add(PRESENT_STATIC, -1)
        self.leave(kv)

    def _give_up_place(self, kv: KeyValues) -> bool:
        if not self._is_mine:
            return True
        self._is_mine = False
        if not self._is_settled:
            text = f"worker {self.record.name!r} (rank {self.record.id}) gave up before the group was complete"
            self._fail(kv, "other", text)
        self._end_generation(kv)
        # the key exists if another worker took this one for dead
        return kv.peek(self._key(f"dead/{self.record.id}")) is None

    def _key(self, name: str) -> str:
        return f"static/{self.generation}/{name}"

    def _find_generation(self, kv: KeyValues) -> None:
        self._set_generation(kv.count(f"static/ended/{self.record.id}"))
        while True:
            outcome = self.start.outcome(kv)
            if not isinstance(outcome, Failed) or time.time() - outcome.at < FAILURE_IS_NEWS_S:
                break
            self._set_generation(self.generation + 1)

    def _end_generation(self, kv: KeyValues) -> None:
        key = f"static/ended/{self.record.id}"
        ended = kv.peek(key)
        if int(ended or 0) <= self.generation:
            kv.swap(key, b"%d" % (self.generation + 1), expected=ended or b"")

    def _fail(self, kv: KeyValues, kind: FailureKind, text: str) -> Failed:
        failed = Failed.now(kind, text)
        self.start.settle(kv, failed)
        return failed

    def _describe(self, present: dict[int, bytes], missing: Sequence[int]) -> str:
        came = listed(f"{decode_record(packed).name!r} (rank {rank})" for rank, packed in present.items())
        return (
            f"the group did not form within {self._timeout_s:g} s: {len(missing)} of {self._size} workers are missing, "
            f"rank {ranges(missing)}; there are {came or 'none'}"
        )


class StaticRendezvous(Rendezvous):
    """A `Rendezvous` of a group of fixed size. The id of a worker is its rank."""

    _presence: StaticPresence | None

    def __init__(self, store: GroupStore) -> None:
        super().__init__(store)
        if store.rank is None or store.world_size is None:
            raise ConfigurationError("a group of fixed size needs rank and world_size")
        self._rank = store.rank
        self._size = store.world_size
        self._gathers: Counter[str] = Counter()
        self._gathering: Round | None = None

    async def _join_once(
        self, name: str, make_record: MakeRecord, probe: Probe | None, deadline: float, timeout_s: float
    ) -> WorkerRecord:
        if self._presence is None:
            record = check_record(make_record(self._rank), name, self._rank)
            self._presence = StaticPresence(record, self._size, timeout_s)
        presence = self._presence  # reused by a second attempt, at another store
        found = await self._store.run(presence.take)
        while isinstance(found, WorkerRecord):
            if await self._is_alive(probe, found, deadline):
                found = await self._store.run(partial(presence.dispute, holder=found))
            else:
                await self._store.run(partial(presence.end_for_dead, holder=found))
                found = await self._store.run(presence.take)
        outcome = found or await presence.start.wait(self._store, deadline, presence.look)
        if isinstance(outcome, Failed):
            raise outcome.error()
        self._by_id = dict(enumerate(map(decode_record, outcome.values)))
        self._by_name = {member.name: member for member in self._by_id.values()}
        return presence.record

    async def gather(self, tag: str, value: bytes, *, timeout_s: float) -> dict[WorkerId, bytes]:
        if self._presence is None or not self._by_id:
            raise RendezvousError("this worker has not joined a group yet")

        def describe(_present: dict[int, bytes], missing: Sequence[int]) -> str:
            names = listed(f"{self._by_id[rank].name!r} (rank {rank})" for rank in missing)
            return f"{tag}: {len(missing)} of {self._size} workers did not come within {timeout_s:g} s: {names}"

        number = self._gathers[tag]
        self._gathers[tag] += 1
        base = f"static/{self._presence.generation}/gather/{tag}.{number}"
        gathering = self._gathering = Round(base, self._rank, self._size, describe)
        await self._store.run(partial(gathering.contribute, value=value))
        outcome = await gathering.wait(self._store, deadline_after(timeout_s))
        self._gathering = None
        if isinstance(outcome, Failed):
            raise outcome.error()
        return dict(enumerate(outcome.values))

    async def awaited(self, every_s: float) -> tuple[WorkerRecord, ...]:
        if self._gathering is None:
            return ()
        missing = await self._store.run(partial(self._gathering.missing, every_s=every_s))
        return tuple(self._by_id[rank] for rank in missing)

    async def fail_gather(self, text: str) -> None:
        if self._gathering is not None:
            await self._store.run(partial(self._gathering.settle, outcome=Failed.now("other", text)))

    def statistics(self) -> dict[str, int | str]:
        generation = self._presence.generation if self._presence is not None else 0
        return {**super().statistics(), "generation": generation}


def ranges(numbers: Sequence[int]) -> str:
    """Return a short text for sorted numbers.

    >>> ranges([0, 2, 3, 4, 7])
    '0, 2-4, 7'
    """
    runs = (list(run) for _, run in groupby(enumerate(numbers), lambda item: item[1] - item[0]))
    return ", ".join(f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else f"{run[0][1]}" for run in runs)
