"""The checks of the soak: what is as promised passes, and everything else is reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.soak.findings import RECOVERY_S, FaultWindow, FaultWindows, Findings
from scripts.soak.records import read_records
from scripts.soak.report import NOTICE_S, Report

SENT = "S a.1.0 call b - 10.0"
OK = "E a.1.0 ok - - 11.0"


def report_of(directory: Path, lines: list[str], findings: Findings | None = None) -> Report:
    """The report on events that are given as lines; those that ran did so on ``b.1``."""
    for process, is_run in (("a.1", False), ("b.1", True)):
        events = [line for line in lines if line.startswith("X") == is_run]
        (directory / f"{process}.ledger").write_text("".join(f"{line}\n" for line in events))
    return Report(1, 60.0, read_records(directory), findings or Findings(), [])


def complaints_of(report: Report) -> list[str]:
    return [problem for problems in report.complaints.values() for problem in problems]


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        pytest.param([SENT, "X a.1.0", OK], None, id="answered"),
        pytest.param([SENT, "E a.1.0 WorkerLostError n b 11.0"], None, id="not-run"),
        pytest.param([SENT, "X a.1.0", "E a.1.0 WorkerLostError - b 11.0"], None, id="may-have-run-and-did"),
        pytest.param([SENT, "E a.1.0 WorkerLostError - b 11.0"], None, id="may-have-run-and-did-not"),
        pytest.param(["S killed.2.0 call b - 10.0", "X killed.2.0"], None, id="caller-killed"),
        pytest.param([SENT, "X a.1.0", "X a.1.0", OK], "ran more than once", id="ran-twice"),
        pytest.param([SENT, "X a.1.0", OK, OK], "ended more than once", id="ended-twice"),
        pytest.param([SENT, "X a.1.0"], "has no end", id="no-end"),
        pytest.param(["S told.1.0 nested-in-thread b - 10.0"], None, id="thread-of-terminated"),
        pytest.param(["S told.1.0 nested-inner b - 10.0"], "has no end", id="coroutine-of-terminated"),
        pytest.param(["S a.1.0 nested-in-thread b - 10.0"], "has no end", id="thread-no-end"),
        pytest.param([SENT, OK], "without having run", id="answered-by-nobody"),
        pytest.param(["S a.1.0 rref-fetch b - 10.0", OK], None, id="runs-no-function"),
        pytest.param([SENT, "X a.1.0", "E a.1.0 WorkerLostError n b 11.0"], "may_have_run=False", id="ran-after-all"),
        pytest.param([SENT, "X a.1.0", "E a.1.0 WorkerLostError np c 11.0"], "may_have_run=False", id="passed-on"),
        pytest.param([SENT, "E a.1.0 WorkerLostError p c 11.0"], None, id="passed-on-may-have-run"),
        pytest.param([SENT, "X a.1.0", "E a.1.0 hung - - 40.0"], "hung", id="hung"),
        pytest.param([SENT, "E a.1.0 hung - - 40.0", "P 10.0 22.0 0.1", "P 22.0 34.0 0.1"], None, id="starved"),
        pytest.param([SENT, "E a.1.0 hung - - 40.0", "P 10.0 18.0 0.0"], "hung", id="hung-and-stopped-for-a-while"),
        pytest.param([SENT, "E a.1.0 hung - - 40.0", "P 10.0 39.0 28.0"], "hung", id="hung-in-a-loop-that-computes"),
        pytest.param(["X a.1.0"], "never sent", id="never-sent"),
        pytest.param([SENT, "X a.1.0", OK, "W 5 instead of 3"], "wrong result: 5 instead of 3", id="wrong"),
        pytest.param([SENT, "X a.1.0", "E a.1.0 RRefError - - 100.0"], None, id="explained"),
        pytest.param(["S a.1.0 call b - 90.0", "E a.1.0 RRefError - - 99.0"], "no fault explains it", id="unexplained"),
        pytest.param(["S a.1.0 call-short b - 90.0", "E a.1.0 RpcTimeoutError - - 90.1"], None, id="asked-for"),
        pytest.param(
            ["S a.1.0 rref-use b - 10.0", "E a.1.0 OwnerLostError - c 11.0"], "is not the owner", id="another-was-lost"
        ),
        pytest.param(["S a.1.0 rref-use b - 10.0", "E a.1.0 OwnerLostError - b 11.0"], None, id="owner-was-lost"),
    ],
)
def test_what_is_not_as_promised_is_reported(tmp_path: Path, lines: list[str], complaint: str | None):
    windows = [FaultWindow(name, 9.0, 10.0) for name in "abc"]
    findings = Findings(windows=windows, unfinished={"killed.2"}, terminated={"told.1"})
    found = complaints_of(report_of(tmp_path, lines, findings))
    if complaint is None:
        assert found == []
    else:
        assert len(found) == 1
        assert complaint in found[0]


def test_a_fault_explains_what_comes_soon_after_it():
    windows = FaultWindows([FaultWindow("a", 10.0, 12.0), FaultWindow("a", 60.0, 60.0, recovery_s=1.0)])
    assert windows.cover(9.0, 10.5, "a")
    assert windows.cover(12.0 + RECOVERY_S - 0.1, 99.0, "a")
    assert windows.cover(60.9, 99.0, ("b", "a"))
    assert windows.cover(60.9, 99.0)
    assert not windows.cover(1.0, 9.9, "a")
    assert not windows.cover(12.0 + RECOVERY_S + 0.1, 59.9, "a")
    assert not windows.cover(61.1, 99.0)
    assert not windows.cover(9.0, 10.5, "b")


@pytest.mark.parametrize(
    ("sent", "victim", "is_explained"),
    [
        ("S a.1.0 call b - 10.0", "a", True),
        ("S a.1.0 call b - 10.0", "b", True),
        ("S a.1.0 call b - 10.0", "c", False),
        ("S a.1.0 nested b c,d 10.0", "c", True),
    ],
)
def test_a_fault_explains_errors_of_calls_that_depend_on_its_worker(
    tmp_path: Path, sent: str, victim: str, is_explained: bool
):
    findings = Findings(windows=[FaultWindow(victim, 9.0, 10.0)])
    report = report_of(tmp_path, [sent, "E a.1.0 RpcTimeoutError - - 11.0"], findings)
    assert ("errors without a fault" not in report.complaints) == is_explained


def test_an_owner_is_lost_only_if_it_or_the_caller_had_a_fault(tmp_path: Path):
    lines = ["S a.1.0 rref-hand-on b c 10.0", "E a.1.0 OwnerLostError - c 11.0"]
    for victim, is_false in (("a", False), ("b", True), ("c", False)):
        report = report_of(tmp_path, lines, Findings(windows=[FaultWindow(victim, 9.0, 10.0)]))
        assert ("owners that were not lost" in report.complaints) == is_false


def test_a_death_shows_at_once(tmp_path: Path):
    lines = [SENT, "X a.1.0", f"E a.1.0 WorkerLostError - b {10.5 + NOTICE_S + 0.5}"]
    findings = Findings(windows=[FaultWindow("b", 10.5, 12.0)], killed_at={"b.1": 10.5})
    (complaint,) = complaints_of(report_of(tmp_path, lines, findings))
    assert "ended 2.5 s after its callee was killed" in complaint
    findings.windows.append(FaultWindow("a", 10.5, 12.0))
    assert complaints_of(report_of(tmp_path, lines, findings)) == []


def test_a_loop_that_stood_still_explains_what_was_late(tmp_path: Path):
    lines = [SENT, "X a.1.0", "E a.1.0 RpcTimeoutError - - 11.0"]
    assert len(complaints_of(report_of(tmp_path, lines))) == 1
    report = report_of(tmp_path, [*lines, "P 10.1 10.9 0.1"])
    assert complaints_of(report) == []
    assert "event loops stood still 1 times" in report.text()


def test_what_is_left_in_the_end_is_reported_by_name(tmp_path: Path):
    mib = 1 << 20
    findings = Findings(
        left={"a": {"rref_context.forks.offers": ["one"], "batches": ["two"]}, "b": {}},
        tables={"a": {"Agent._peers (departed)": 100_000, "Roster._members (departed)": 7}},
        codes=[("a", "leave", 0), ("b", "SIGTERM", 1)],
        crashes=[("c.4", 1)],
        memory={"a.1": [(float(second), (100 + second) * mib) for second in range(0, 300, 2)]},
        orphans=2,
        failures=["b did not answer"],
    )
    report = report_of(tmp_path, [SENT, "X a.1.0", OK], findings)
    report.sockets.append("run/x.sock")
    text = "\n".join(complaints_of(report))
    for part in (
        "a has rref_context.forks.offers: ['one']",
        "a has batches: ['two']",
        "a has 100000 entries in Agent._peers",
        "b ended with 1 after SIGTERM",
        "c.4 ended by itself with 1",
        "a.1 grew from",
        "2 children of handlers did not end",
        "a socket is left: run/x.sock",
        "b did not answer",
    ):
        assert part in text
    assert "_members" not in text


def test_the_report_has_count_outcomes_and_worst_latency_of_each_kind(tmp_path: Path):
    lines = [
        *("S a.1.0 call b - 10.0", "X a.1.0", "E a.1.0 ok - - 10.5"),
        *("S a.1.1 call b - 50.0", "X a.1.1", "E a.1.1 ok - - 59.0"),
        *("S a.1.2 stream b - 10.0", "X a.1.2", "E a.1.2 RpcTimeoutError - - 10.5"),
    ]
    report = report_of(tmp_path, lines, Findings(windows=[FaultWindow("b", 55.0, 55.0)]))
    figures = json.loads(json.dumps(report.figures()))
    assert figures["kinds"] == {
        "call": {"count": 2, "outcomes": {"ok": 2}, "unexplained_errors": 0, "worst_s": 0.5},
        "stream": {"count": 1, "outcomes": {"RpcTimeoutError": 1}, "unexplained_errors": 1, "worst_s": 0.0},
    }
    assert "| call | 2 | 2 | 0 | 0 | 0 | 0.50 s |" in report.text()
    assert figures["summary"] in report.text()
    assert "3 calls" in figures["summary"]


@pytest.mark.parametrize(("stalled_s", "is_judged"), [(20.0, True), (80.0, False)])
def test_memory_is_judged_unless_the_worker_got_no_cpu(tmp_path: Path, stalled_s: float, is_judged: bool):
    findings = Findings(memory={"a.1": [(float(second), (200 << 20) + (second << 20)) for second in range(300)]})
    report = report_of(tmp_path, [f"P 150.0 {150.0 + stalled_s} 0.1"], findings)
    assert list(report.complaints) == (["memory"] if is_judged else [])
    assert ("not judged: the memory of a.1" in report.text()) is not is_judged


def test_calls_that_could_not_be_judged_are_counted(tmp_path: Path):
    report = report_of(tmp_path, [SENT, "E a.1.0 hung - - 40.0", "P 10.0 39.0 0.1"])
    assert not report.complaints
    assert "not judged: 1 calls" in report.text()
