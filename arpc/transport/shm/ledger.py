"""Who has which block of an arena. Pure bookkeeping.

A block has *holders*: this worker itself, while it copies into it or has a tensor there, and those it was lent to, once
for every time. A loan is known by its borrower and the offset that was named to it. What was lent to a borrower that
cannot be heard any more stays lent until it is known what has become of it: it may still read there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from arpc.transport.shm.blocks import Block

__all__ = ["Ledger"]


@dataclass(slots=True, eq=False)
class _Loan:
    block: Block
    size_bytes: int = 0
    count: int = 0


class Ledger:
    """Counts the holders of blocks. ``free`` is called with each block that nobody holds any more."""

    def __init__(self, free: Callable[[Block], None]) -> None:
        self._free = free
        self._loans: dict[int, dict[int, _Loan]] = {}

    def hold(self, block: Block) -> None:
        block.holders += 1

    def let_go(self, block: Block) -> None:
        block.holders -= 1
        if not block.holders:
            self._free(block)

    def lend(self, borrower: int, offset: int, size_bytes: int, block: Block) -> None:
        """Note a loan. The holding that the lender had of the block while it got it ready goes over to the borrower."""
        loans = self._loans.setdefault(borrower, {})
        loan = loans.get(offset)
        if loan is None:
            loan = loans[offset] = _Loan(block)
        loan.count += 1
        loan.size_bytes = max(loan.size_bytes, size_bytes)

    def take_back(self, borrower: int, offset: int) -> None:
        """The borrower has ended one loan. Raises `KeyError` if it has none there."""
        loans = self._loans[borrower]
        loan = loans[offset]
        loan.count -= 1
        if not loan.count:
            del loans[offset]
            if not loans:
                del self._loans[borrower]
        self.let_go(loan.block)

    def reconcile(self, borrower: int, held: Iterable[int]) -> None:
        """A borrower says what it still has: an offset for each loan. Raises `KeyError` if it has more than was lent.

        Whatever else was lent to it never arrived, or was given back unheard. One that is no more has nothing.
        """
        still = Counter(held)
        loans = self._loans.get(borrower, {})
        for offset, count in still.items():
            if count > loans[offset].count:
                raise KeyError(offset)
        for offset, count in [(offset, loan.count - still[offset]) for offset, loan in loans.items()]:
            for _ in range(count):
                self.take_back(borrower, offset)

    def has_loans(self, borrower: int) -> bool:
        return borrower in self._loans

    def lent_bytes(self) -> dict[int, int]:
        """By borrower. What was lent several times counts once."""
        return {borrower: sum(loan.size_bytes for loan in loans.values()) for borrower, loans in self._loans.items()}
