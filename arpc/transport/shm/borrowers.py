"""Who has which block of an arena. Pure bookkeeping.

A block has *holders*: this worker itself, while it copies into it or has a tensor there, and those it was lent to, once
for every time. A loan is known by its borrower and the offset that was named to it. What was lent to a borrower that
cannot be heard any more stays lent until it is known what has become of it: it may still read there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from arpc.transport.shm.blocks import Block
from arpc.transport.shm.processes import ProcessWatch

__all__ = ["Borrower"]


@dataclass(slots=True, eq=False)
class _Loan:
    block: Block
    size_bytes: int = 0
    count: int = 0


@dataclass(slots=True, eq=False)
class Borrower:
    """A peer that has mapped the arena, and what it was lent: by offset, as it was named to it."""

    name: str
    watch: ProcessWatch
    link: object = None
    """What it is connected by."""
    loans: dict[int, _Loan] = field(default_factory=dict)

    def lend(self, offset: int, size_bytes: int, block: Block) -> None:
        """Note a loan. The holding that the lender had of the block while it got it ready goes over to the borrower."""
        loan = self.loans.get(offset)
        if loan is None:
            loan = self.loans[offset] = _Loan(block)
        loan.count += 1
        loan.size_bytes = max(loan.size_bytes, size_bytes)

    def take_back(self, offset: int) -> Block:
        """The borrower has ended one loan, and does not hold this block any more. Raises `KeyError` if it has none."""
        loan = self.loans[offset]
        loan.count -= 1
        if not loan.count:
            del self.loans[offset]
        return loan.block

    def reconcile(self, held: Iterable[int]) -> list[Block]:
        """The borrower says what it still has: an offset for each loan. Raises `KeyError` if it has more than was lent.

        Whatever else was lent to it never arrived, or was given back unheard; of these, returns the block of each. A
        borrower that is no more has nothing.
        """
        still = Counter(held)
        for offset, count in still.items():
            if count > self.loans[offset].count:
                raise KeyError(offset)
        ended = {offset: loan.count - still[offset] for offset, loan in self.loans.items()}
        return [self.take_back(offset) for offset in Counter(ended).elements()]

    @property
    def lent_bytes(self) -> int:
        """What was lent several times counts once."""
        return sum(loan.size_bytes for loan in self.loans.values())
