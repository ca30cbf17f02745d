"""An all-gather through a store, in a number of operations that grows with the group and not with its square.

Each worker writes its value and counts itself; the last one collects all values into one key, which the others wait
for. A round has one outcome, decided once, the same for all.
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
"""How long to wait for the one worker that finds out which are missing, before this worker does it too."""

LONGEST_DELAY_S: Final = 0.05
DELAY_PER_WORKER_S: Final = 0.0005
"""The longest pause between polls, per worker of the group: the store of a large one needs time for other work."""

FailureKind: TypeAlias = Literal["name", "timeout", "other"]

_ERRORS: Final[dict[FailureKind, type[RendezvousError]]] = {
    "name": NameTakenError,
    "timeout": RendezvousTimeoutError,
    "other": RendezvousError,
}


class Complete(msgspec.Struct, frozen=True, tag="complete"):
    """All workers came; their values by rank."""

    values: tuple[bytes, ...]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The round will never be complete."""

    kind: FailureKind
    text: str
    at: float
    """The time of the failure, by the clock of the worker that noticed it."""

    @classmethod
    def now(cls, kind: FailureKind, text: str) -> Failed:
        return cls(kind, text, time.time())

    def error(self) -> RendezvousError:
        return _ERRORS[self.kind](self.text)


Outcome: TypeAlias = Complete | Failed

_decoder: Final[msgspec.msgpack.Decoder[Outcome]] = msgspec.msgpack.Decoder(Complete | Failed)

Describe: TypeAlias = Callable[[dict[int, bytes], Sequence[int]], str]
"""Returns the text for an incomplete round, from the values that there are and the ranks that are missing."""


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
        """Write this worker's value, and `arrive`, which is enough if the value was written to its key already."""
        kv.set(self.value_key(self._rank), value)
        self.arrive(kv)

    def arrive(self, kv: KeyValues) -> None:
        """Count this worker's value as written; the last worker completes the round."""
        if kv.add(f"{self._base}/arrived", 1) == self._size:
            self._complete(kv)

    def outcome(self, kv: KeyValues) -> Outcome | None:
        packed = kv.peek(f"{self._base}/outcome")
        return None if packed is None else decode(packed, _decoder)

    def settle(self, kv: KeyValues, outcome: Outcome) -> Outcome:
        """Propose an outcome; returns the one that the round has, which may have been decided before."""
        return decode(kv.swap(f"{self._base}/outcome", encode(outcome)), _decoder)

    async def wait(
        self, store: GroupStore, deadline: float, look: Callable[[KeyValues], Outcome | None] | None = None
    ) -> Outcome:
        """Wait for the outcome. If there is none at the deadline, the workers that wait decide it."""
        look = look or self.outcome
        longest_delay_s = max(LONGEST_DELAY_S, self._size * DELAY_PER_WORKER_S)
        found: Outcome | None = await store.poll(look, deadline=deadline, longest_delay_s=longest_delay_s)
        # All workers time out at about the same time. If each read the keys of all ranks, there would be n * n reads.
        if found is None and not await store.run(self._claim_report):
            found = await store.poll(look, deadline=deadline_after(REPORT_LIMIT_S), longest_delay_s=longest_delay_s)
        if found is None:
            return await store.run(self._give_up)
        return found

    def _complete(self, kv: KeyValues) -> Outcome:
        values = kv.fetch([self.value_key(rank) for rank in range(self._size)])
        return self.settle(kv, Complete(tuple(values)))

    def missing(self, kv: KeyValues, every_s: float) -> list[int]:
        """Return the ranks that have not come, to one worker in each period; the others get an empty list."""
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
            return self._complete(kv)  # the worker that should have completed the round is gone
        present = {rank: value for rank, value in found.items() if value is not None}
        return self.settle(kv, Failed.now("timeout", self._describe(present, missing)))
