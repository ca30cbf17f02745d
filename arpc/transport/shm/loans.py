"""What one worker has lent to another of its arena, as both of them note it. Pure bookkeeping.

A loan is known by the offset that was named to the borrower. The same place may be lent several times, and is then
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
    """Those of one lender to one borrower. The lender knows which block a loan is of: the ``subject``."""

    def __init__(self) -> None:
        self._loans: dict[int, _Loan[T]] = {}

    def __bool__(self) -> bool:
        return bool(self._loans)

    def begin(self, offset: int, size_bytes: int, subject: T) -> None:
        """So many bytes are lent."""
        loan = self._loans.get(offset)
        if loan is None:
            loan = self._loans[offset] = _Loan(subject)
        loan.count += 1
        loan.size_bytes = max(loan.size_bytes, size_bytes)

    def end(self, offset: int) -> T:
        """One loan has ended, of this subject. Raises `KeyError` if there is none."""
        loan = self._loans[offset]
        loan.count -= 1
        if not loan.count:
            del self._loans[offset]
        return loan.subject

    def reconcile(self, held: Iterable[int]) -> list[T]:
        """The borrower says what it still has, as `held` does. Raises `KeyError` if it has more than was lent.

        Whatever else was lent to it never arrived, or was given back unheard; of these, returns the subject of each. A
        borrower that is no more has nothing.
        """
        still = Counter(held)
        for offset, count in still.items():
            if count > self._loans[offset].count:
                raise KeyError(offset)
        return [self.end(offset) for offset in (Counter(self.held()) - still).elements()]

    def held(self) -> list[int]:
        """An offset for each loan."""
        return [offset for offset, loan in self._loans.items() for _ in range(loan.count)]

    def ranges(self) -> list[tuple[int, int]]:
        """From and to where memory is lent, in order."""
        return sorted((offset, offset + loan.size_bytes) for offset, loan in self._loans.items())

    @property
    def size_bytes(self) -> int:
        """What is lent several times counts once."""
        return sum(loan.size_bytes for loan in self._loans.values())
