"""Who has which block: each loan ends once, and only as it was made."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from arpc.transport.shm.blocks import Block
from arpc.transport.shm.loans import Loans

OFFSETS = (64, 128, 192)


def lent(loans: Loans[Block], block: Block, offset: int | None = None) -> None:
    loans.begin(block.offset if offset is None else offset, 100, block)


def test_a_loan_ends_once():
    loans, block = Loans[Block](), Block(64, 64)
    lent(loans, block)
    assert loans.end(64) is block
    with pytest.raises(KeyError):
        loans.end(64)


@pytest.mark.parametrize("offset", [65, 0])
def test_what_was_not_lent_cannot_be_given_back(offset):
    loans = Loans[Block]()
    lent(loans, Block(64, 64))
    with pytest.raises(KeyError):
        loans.end(offset)
    assert loans.size_bytes == 100


def test_what_was_lent_twice_ends_twice():
    loans, block = Loans[Block](), Block(64, 64)
    for offset in (64, 64, 80):
        lent(loans, block, offset)
    assert loans.size_bytes == 200
    for offset in (64, 64, 80):
        assert loans
        assert loans.end(offset) is block
    assert not loans


def test_a_borrower_that_is_back_has_what_it_says():
    loans = Loans[Block]()
    blocks = [Block(offset, 64) for offset in OFFSETS]
    for block in [*blocks, blocks[0]]:
        lent(loans, block)
    assert loans.reconcile([64, 128]) == [blocks[0], blocks[2]]
    assert loans.end(64) is blocks[0]
    assert loans.reconcile([]) == [blocks[1]]
    assert not loans


@pytest.mark.parametrize("held", [[64, 64], [128]])
def test_a_borrower_cannot_have_more_than_was_lent(held):
    loans = Loans[Block]()
    lent(loans, Block(64, 64))
    with pytest.raises(KeyError):
        loans.reconcile(held)
    assert loans


class LoansMachine(RuleBasedStateMachine):
    """Blocks that are lent, given back and written off, against a plain count."""

    def __init__(self) -> None:
        super().__init__()
        self.lent = Loans[Block]()
        self.blocks = {offset: Block(offset, 64) for offset in OFFSETS}
        self.loans: Counter[int] = Counter()

    @rule(offset=st.sampled_from(OFFSETS))
    def lend(self, offset: int) -> None:
        lent(self.lent, self.blocks[offset])
        self.loans[offset] += 1

    @rule(offset=st.sampled_from(OFFSETS))
    def take_back(self, offset: int) -> None:
        if self.loans[offset]:
            self.loans[offset] -= 1
            assert self.lent.end(offset) is self.blocks[offset]
        else:
            with pytest.raises(KeyError):
                self.lent.end(offset)

    @rule(data=st.data())
    def reconcile(self, data: st.DataObject) -> None:
        still = Counter({offset: data.draw(st.integers(0, count)) for offset, count in self.loans.items()})
        ended = self.lent.reconcile(still.elements())
        assert Counter(block.offset for block in ended) == +(self.loans - still)
        self.loans = still

    @rule()
    def write_off(self) -> None:
        assert len(self.lent.reconcile(())) == self.loans.total()
        self.loans.clear()

    @invariant()
    def loans_are_those_that_have_not_ended(self) -> None:
        assert Counter(self.lent.held()) == +self.loans
        assert self.lent.ranges() == [(offset, offset + 100) for offset in sorted(+self.loans)]


TestLoans = LoansMachine.TestCase
