"""The loans from one worker's arena to one peer, as both sides record them. Pure bookkeeping.

A loan is identified by the offset that was sent to the borrower. The same offset may be lent several times, and is then
given back as often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Loans"]

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Loan(Generic[T]):
    subject: T
    size_bytes: int = 0
    count: int = 0


class Loans(Generic[T]):
    """The loans of one lender to one borrower. The ``subject``, known to the lender only, is the block that is lent."""

    def __init__(self) -> None:
        self._loans: dict[int, _Loan[T]] = {}

    def __bool__(self) -> bool:
        return bool(self._loans)

    def begin(self, offset: int, size_bytes: int, subject: T) -> None:
        """Record a loan of this many bytes."""
        loan = self._loans.get(offset)
        if loan is None:
            loan = self._loans[offset] = _Loan(subject)
        loan.count += 1
        loan.size_bytes = max(loan.size_bytes, size_bytes)

    def end(self, offset: int) -> T:
        """Record the end of one loan; returns its subject. Raises `KeyError` if there is none."""
        loan = self._loans[offset]
        loan.count -= 1
        if not loan.count:
            del self._loans[offset]
        return loan.subject

    def reconcile(self, held: Iterable[int]) -> list[T]:
        """End all loans but those that the borrower still holds, as its `held` returned them; returns their subjects.

        The ended loans never arrived, or the message that gave them back was lost. A borrower whose process has ended
        holds none. Raises `KeyError` if the borrower holds more than was lent.
        """
        still = Counter(held)
        for offset, count in still.items():
            if count > self._loans[offset].count:
                raise KeyError(offset)
        return [self.end(offset) for offset in (Counter(self.held()) - still).elements()]

    def held(self) -> list[int]:
        """Return the offset of each loan."""
        return [offset for offset, loan in self._loans.items() for _ in range(loan.count)]

    def ranges(self) -> list[tuple[int, int]]:
        """Return the start and the end of each lent range, in order."""
        return sorted((offset, offset + loan.size_bytes) for offset, loan in self._loans.items())

    @property
    def size_bytes(self) -> int:
        """The bytes that are lent; memory that is lent several times counts once."""
        return sum(loan.size_bytes for loan in self._loans.values())
