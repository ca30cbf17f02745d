"""An all-gather through a store, in a number of operations that grows with the group and not with its square.

Each worker leaves its value and counts itself; the last to come collects all of them into one key, which the others
wait for. A round has one outcome, decided once, the same for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from arpc.errors import NameTakenError, RendezvousError, RendezvousTimeoutError
from arpc.group.group_store import GroupStore, KeyValues, deadline_after
from arpc.group.membership import decode, encode

__all__ = ["Complete", "Failed", "FailureKind", "Outcome", "Round"]

REPORT_LIMIT_S: Final = 1.0
"""How long to wait for the one worker that finds out which are missing, before doing it here."""

LONGEST_DELAY_S: Final = 0.05
DELAY_PER_WORKER_S: Final = 0.0005
"""Together, the pauses of all workers that wait leave the store of a large group time for other things."""

FailureKind: TypeAlias = Literal["name", "timeout", "other"]

_ERRORS: Final[dict[FailureKind, type[RendezvousError]]] = {
    "name": NameTakenError,
    "timeout": RendezvousTimeoutError,
    "other": RendezvousError,
}


class Complete(msgspec.Struct, frozen=True, tag="complete"):
    """All came; their values by rank."""

    values: tuple[bytes, ...]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The round will never be complete."""

    kind: FailureKind
    text: str
    at: float
    """When, by the clock of the worker that found out."""

    @classmethod
    def now(cls, kind: FailureKind, text: str) -> Failed:
        return cls(kind, text, time.time())

    def error(self) -> RendezvousError:
        return _ERRORS[self.kind](self.text)


Outcome: TypeAlias = Complete | Failed

_decoder: Final[msgspec.msgpack.Decoder[Outcome]] = msgspec.msgpack.Decoder(Complete | Failed)

Describe: TypeAlias = Callable[[dict[int, bytes], Sequence[int]], str]
"""Words for a round that is not complete: the values there are, and the ranks that are missing."""


class Round:
    """One round as one worker sees it. The methods that take `KeyValues` run in the store's thread."""

    def __init__(self, base: str, rank: int, size: int, describe: Describe) -> None:
        self._base = base
        self._rank = rank
        self._size = size
        self._describe = describe

    def value_key(self, rank: int) -> str:
        return f"{self._base}/value/{rank}"

    def contribute(self, kv: KeyValues, value: bytes) -> None:
        """Leave this worker's value. If it has been written to its key already, `arrive` is enough."""
        kv.set(self.value_key(self._rank), value)
        self.arrive(kv)

    def arrive(self, kv: KeyValues) -> None:
        """Say that this worker's value is there; the last one closes the round."""
        if kv.add(f"{self._base}/arrived", 1) == self._size:
            self._complete(kv)

    def outcome(self, kv: KeyValues) -> Outcome | None:
        packed = kv.peek(f"{self._base}/outcome")
        return None if packed is None else decode(packed, _decoder)

    def settle(self, kv: KeyValues, outcome: Outcome) -> Outcome:
        """Propose an outcome; the one that the round has, which may have been decided before."""
        return decode(kv.swap(f"{self._base}/outcome", encode(outcome)), _decoder)

    async def wait(
        self, store: GroupStore, deadline: float, look: Callable[[KeyValues], Outcome | None] | None = None
    ) -> Outcome:
        """Wait for the outcome. At the deadline it is decided here."""
        look = look or self.outcome
        longest_delay_s = max(LONGEST_DELAY_S, self._size * DELAY_PER_WORKER_S)
        found: Outcome | None = await store.poll(look, deadline=deadline, longest_delay_s=longest_delay_s)
        # All lose patience at about the same time. If each looked for every rank, that would be n times n looks.
        if found is None and not await store.run(self._claim_report):
            found = await store.poll(look, deadline=deadline_after(REPORT_LIMIT_S), longest_delay_s=longest_delay_s)
        if found is None:
            return await store.run(self._give_up)
        return found

    def _complete(self, kv: KeyValues) -> Outcome:
        values = kv.fetch([self.value_key(rank) for rank in range(self._size)])
        return self.settle(kv, Complete(tuple(values)))

    def missing(self, kv: KeyValues, every_s: float) -> list[int]:
        """The ranks that have not come. Told to one worker in each period; to the others, nobody is missing."""
        period = int(time.time() / every_s)
        if kv.add(f"{self._base}/looks/{period}", 1) != 1:
            return []
        return [rank for rank in range(self._size) if kv.peek(self.value_key(rank)) is None]

    def _claim_report(self, kv: KeyValues) -> bool:
        return kv.add(f"{self._base}/reporters", 1) == 1

    def _give_up(self, kv: KeyValues) -> Outcome:
        found = {rank: kv.peek(self.value_key(rank)) for rank in range(self._size)}
        missing = [rank for rank, value in found.items() if value is None]
        if not missing:
            return self._complete(kv)  # the worker that should have done it is gone
        present = {rank: value for rank, value in found.items() if value is not None}
        return self.settle(kv, Failed.now("timeout", self._describe(present, missing)))
