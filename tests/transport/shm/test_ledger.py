"""Who has which block: it is free when nobody has it, and never before."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from arpc.transport.shm.blocks import Block
from arpc.transport.shm.ledger import Ledger

BORROWERS = (7, 8)


@pytest.fixture
def freed() -> list[Block]:
    """The blocks that nobody holds any more."""
    return []


@pytest.fixture
def ledger(freed: list[Block]) -> Ledger:
    return Ledger(freed.append)


def lent(ledger: Ledger, block: Block, borrower: int = 7, offset: int | None = None) -> None:
    ledger.hold(block)
    ledger.lend(borrower, block.offset if offset is None else offset, 100, block)


def test_a_loan_ends_once(ledger, freed):
    block = Block(64, 64)
    lent(ledger, block)
    ledger.take_back(7, 64)
    assert freed == [block]
    with pytest.raises(KeyError):
        ledger.take_back(7, 64)


@pytest.mark.parametrize(("borrower", "offset"), [(8, 64), (7, 65), (7, 0)])
def test_what_was_not_lent_cannot_be_given_back(ledger, freed, borrower, offset):
    block = Block(64, 64)
    lent(ledger, block)
    with pytest.raises(KeyError):
        ledger.take_back(borrower, offset)
    assert block.holders == 1
    assert not freed


def test_the_last_of_several_holders_frees_a_block(ledger, freed):
    block = Block(64, 64)
    ledger.hold(block)
    lent(ledger, block, 7)
    lent(ledger, block, 7)
    lent(ledger, block, 8, offset=80)
    assert ledger.lent_bytes() == {7: 100, 8: 100}
    for borrower, offset in ((7, 64), (7, 64), (8, 80)):
        ledger.take_back(borrower, offset)
    assert not freed
    ledger.let_go(block)
    assert freed == [block]


def test_a_borrower_that_is_back_has_what_it_says(ledger, freed):
    blocks = [Block(64 * number, 64) for number in (1, 2, 3)]
    for block in [*blocks, blocks[0]]:
        lent(ledger, block)
    ledger.reconcile(7, [64, 128])
    assert freed == [blocks[2]]
    ledger.take_back(7, 64)
    assert freed == [blocks[2], blocks[0]]
    ledger.reconcile(7, [])
    assert freed == [blocks[2], blocks[0], blocks[1]]
    assert not ledger.has_loans(7)


@pytest.mark.parametrize("held", [[64, 64], [128]])
def test_a_borrower_cannot_have_more_than_was_lent(ledger, held):
    block = Block(64, 64)
    lent(ledger, block)
    with pytest.raises(KeyError):
        ledger.reconcile(7, held)
    assert ledger.has_loans(7)


class LedgerMachine(RuleBasedStateMachine):
    """Blocks that are held, lent, given back and written off, against a plain count."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(self._freed)
        self.blocks = {offset: Block(offset, 64) for offset in (64, 128, 192)}
        self.held: Counter[int] = Counter()
        self.loans: dict[int, Counter[int]] = {borrower: Counter() for borrower in BORROWERS}
        self.free = set(self.blocks)

    def _freed(self, block: Block) -> None:
        assert block.offset not in self.free, "a block became free twice"
        self.free.add(block.offset)

    @rule(offset=st.sampled_from((64, 128, 192)))
    def hold(self, offset: int) -> None:
        self.ledger.hold(self.blocks[offset])
        self.held[offset] += 1
        self.free.discard(offset)

    @rule(offset=st.sampled_from((64, 128, 192)))
    def let_go(self, offset: int) -> None:
        if self.held[offset]:
            self.held[offset] -= 1
            self.ledger.let_go(self.blocks[offset])

    @rule(offset=st.sampled_from((64, 128, 192)), borrower=st.sampled_from(BORROWERS))
    def lend(self, offset: int, borrower: int) -> None:
        lent(self.ledger, self.blocks[offset], borrower)
        self.loans[borrower][offset] += 1
        self.free.discard(offset)

    @rule(offset=st.sampled_from((64, 128, 192)), borrower=st.sampled_from(BORROWERS))
    def take_back(self, offset: int, borrower: int) -> None:
        if self.loans[borrower][offset]:
            self.loans[borrower][offset] -= 1
            self.ledger.take_back(borrower, offset)
        else:
            with pytest.raises(KeyError):
                self.ledger.take_back(borrower, offset)

    @rule(borrower=st.sampled_from(BORROWERS), data=st.data())
    def reconcile(self, borrower: int, data: st.DataObject) -> None:
        loans = self.loans[borrower]
        still = Counter({offset: data.draw(st.integers(0, count)) for offset, count in loans.items()})
        self.ledger.reconcile(borrower, still.elements())
        self.loans[borrower] = still

    @rule(borrower=st.sampled_from(BORROWERS))
    def write_off(self, borrower: int) -> None:
        self.ledger.reconcile(borrower, ())
        self.loans[borrower].clear()

    @invariant()
    def free_is_what_nobody_has(self) -> None:
        for offset, block in self.blocks.items():
            holders = self.held[offset] + sum(loans[offset] for loans in self.loans.values())
            assert block.holders == holders
            assert (offset in self.free) == (holders == 0)
        for borrower, loans in self.loans.items():
            assert self.ledger.has_loans(borrower) == bool(+loans)


TestLedger = LedgerMachine.TestCase
