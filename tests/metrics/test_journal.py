"""What a worker logged and which of its handlers failed: bounded, whatever happens."""

from __future__ import annotations

import asyncio
import logging

import pytest

from arpc.log import get_logger
from arpc.metrics.journal import MAX_ERRORS, MAX_LINES, MAX_MESSAGE, Journal


@pytest.fixture
def journal():
    made = Journal("worker0")
    yield made
    made.close()


def failure(text: str = "no", kind: type[Exception] = ValueError) -> Exception:
    try:
        raise kind(text)
    except kind as error:
        return error


def test_lines_by_level_and_text(journal: Journal):
    logging.getLogger("test.journal").warning("one %s", "spade")
    logging.getLogger("test.journal").error("two clubs")
    assert [(line.level, line.message) for line in journal.logs().lines] == [
        ("WARNING", "one spade"),
        ("ERROR", "two clubs"),
    ]
    assert [line.message for line in journal.logs(level="error").lines] == ["two clubs"]
    assert [line.message for line in journal.logs(search="SPADE").lines] == ["one spade"]
    assert [line.message for line in journal.logs(limit=1).lines] == ["two clubs"]


def test_a_line_has_the_traceback_that_was_logged(journal: Journal):
    try:
        raise KeyError("gone")
    except KeyError:
        logging.getLogger("test.journal").exception("that was bad")
    (line,) = journal.logs().lines
    assert line.message == "that was bad"
    assert line.traceback.endswith("KeyError: 'gone'\n")
    assert journal.logs(search="gone").lines == [line]


def test_a_line_that_cannot_be_formatted_is_kept_as_it_is(journal: Journal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logging.getLogger("test.journal").warning("%d cards", "many")
    assert [line.message for line in journal.logs().lines] == ["%d cards"]


def test_a_program_that_sets_logging_up_later_still_can(journal: Journal):
    assert logging.lastResort is not None
    assert journal not in logging.getLogger().handlers
    before = list(logging.getLogger().handlers)
    logging.getLogger("test.journal").warning("a word")
    assert logging.getLogger().handlers == before


def test_lines_of_another_worker_of_the_process_are_not_its_own(journal: Journal):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("arpc.log._Source.read", staticmethod(lambda: {"worker": "worker1", "peer": "x"}))
        get_logger("test.journal").warning("somebody else's")
        patch.setattr("arpc.log._Source.read", staticmethod(lambda: {"worker": "worker0", "peer": "x"}))
        get_logger("test.journal").warning("its own")
    assert [(line.message, line.peer) for line in journal.logs().lines] == [("its own", "x")]


def test_it_is_bounded(journal: Journal):
    for number in range(2 * MAX_LINES):
        logging.getLogger("test.journal").warning("line %d", number)
    logging.getLogger("test.journal").warning("x" * 10 * MAX_MESSAGE)
    lines = journal.logs().lines
    assert len(lines) == MAX_LINES
    assert len(lines[-1].message) < MAX_MESSAGE + 10
    for number in range(2 * MAX_ERRORS):
        journal.failed("peer", f"function{number}", failure())
    functions = [entry.function for entry in journal.errors().errors]
    assert len(functions) == MAX_ERRORS
    assert f"function{2 * MAX_ERRORS - 1}" in functions


def test_failures_of_a_kind_are_counted_and_described_once_a_second(journal: Journal, monkeypatch: pytest.MonkeyPatch):
    now = 1000.0
    monkeypatch.setattr("arpc.metrics.journal.time.time", lambda: now)
    journal.failed("a", "train", failure("first"))
    now += 0.5
    journal.failed("b", "train", failure("second"))
    (entry,) = journal.errors().errors
    assert (entry.count, entry.message, entry.caller, entry.last_s) == (2, "first", "a", 1000.5)
    now += 2
    journal.failed("b", "train", failure("third"))
    journal.failed("b", "train", failure("other", KeyError))
    latest = {entry.error: entry for entry in journal.errors().errors}
    assert (latest["ValueError"].count, latest["ValueError"].message) == (3, "third")
    assert (latest["ValueError"].first_s, latest["ValueError"].last_s) == (1000.0, 1002.5)
    assert "test_journal.py" in latest["KeyError"].traceback


def test_what_was_cancelled_is_no_failure(journal: Journal):
    journal.failed("a", "train", asyncio.CancelledError())
    assert journal.errors().errors == []


def test_nothing_is_heard_after_the_end():
    before = logging.getLogRecordFactory()
    first, second = Journal("worker0"), Journal("worker1")
    first.close()
    logging.getLogger("test.journal").warning("a word")
    assert first.logs().lines == []
    assert len(second.logs().lines) == 1
    second.close()
    assert logging.getLogRecordFactory() is before
