"""Who has which block: each loan ends once, and only as it was made."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from arpc.transport.shm.blocks import Block
from arpc.transport.shm.borrowers import Borrower
from arpc.transport.shm.processes import ProcessWatch

OFFSETS = (64, 128, 192)


def someone() -> Borrower:
    return Borrower("someone", ProcessWatch.__new__(ProcessWatch))


def lent(borrower: Borrower, block: Block, offset: int | None = None) -> None:
    borrower.lend(block.offset if offset is None else offset, 100, block)


def test_a_loan_ends_once():
    borrower, block = someone(), Block(64, 64)
    lent(borrower, block)
    assert borrower.take_back(64) is block
    with pytest.raises(KeyError):
        borrower.take_back(64)


@pytest.mark.parametrize("offset", [65, 0])
def test_what_was_not_lent_cannot_be_given_back(offset):
    borrower = someone()
    lent(borrower, Block(64, 64))
    with pytest.raises(KeyError):
        borrower.take_back(offset)
    assert borrower.lent_bytes == 100


def test_what_was_lent_twice_ends_twice():
    borrower, block = someone(), Block(64, 64)
    for offset in (64, 64, 80):
        lent(borrower, block, offset)
    assert borrower.lent_bytes == 200
    for offset in (64, 64, 80):
        assert borrower.loans
        assert borrower.take_back(offset) is block
    assert not borrower.loans


def test_a_borrower_that_is_back_has_what_it_says():
    borrower = someone()
    blocks = [Block(offset, 64) for offset in OFFSETS]
    for block in [*blocks, blocks[0]]:
        lent(borrower, block)
    assert borrower.reconcile([64, 128]) == [blocks[0], blocks[2]]
    assert borrower.take_back(64) is blocks[0]
    assert borrower.reconcile([]) == [blocks[1]]
    assert not borrower.loans


@pytest.mark.parametrize("held", [[64, 64], [128]])
def test_a_borrower_cannot_have_more_than_was_lent(held):
    borrower = someone()
    lent(borrower, Block(64, 64))
    with pytest.raises(KeyError):
        borrower.reconcile(held)
    assert borrower.loans


class BorrowerMachine(RuleBasedStateMachine):
    """Blocks that are lent, given back and written off, against a plain count."""

    def __init__(self) -> None:
        super().__init__()
        self.borrower = someone()
        self.blocks = {offset: Block(offset, 64) for offset in OFFSETS}
        self.loans: Counter[int] = Counter()

    @rule(offset=st.sampled_from(OFFSETS))
    def lend(self, offset: int) -> None:
        lent(self.borrower, self.blocks[offset])
        self.loans[offset] += 1

    @rule(offset=st.sampled_from(OFFSETS))
    def take_back(self, offset: int) -> None:
        if self.loans[offset]:
            self.loans[offset] -= 1
            assert self.borrower.take_back(offset) is self.blocks[offset]
        else:
            with pytest.raises(KeyError):
                self.borrower.take_back(offset)

    @rule(data=st.data())
    def reconcile(self, data: st.DataObject) -> None:
        still = Counter({offset: data.draw(st.integers(0, count)) for offset, count in self.loans.items()})
        ended = self.borrower.reconcile(still.elements())
        assert Counter(block.offset for block in ended) == +(self.loans - still)
        self.loans = still

    @rule()
    def write_off(self) -> None:
        assert len(self.borrower.reconcile(())) == self.loans.total()
        self.loans.clear()

    @invariant()
    def loans_are_those_that_have_not_ended(self) -> None:
        assert {offset: loan.count for offset, loan in self.borrower.loans.items()} == +self.loans


TestBorrower = BorrowerMachine.TestCase
