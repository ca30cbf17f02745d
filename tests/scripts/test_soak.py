"""The books of the soak: what adds up passes, and everything else is complained of."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import arpc
from scripts.soak.director import RECOVERY_S, Findings
from scripts.soak.ledger import Ledger, read_books
from scripts.soak.report import Report

CALLER, CALLEE = "a.1", "b.1"


def write(directory: Path, *lines: str) -> None:
    (directory / "all.ledger").write_text("".join(f"{line}\n" for line in lines))


SENT = "S a.1.0 call b 10.0"
RAN = "X a.1.0"
OK = "E a.1.0 ok 11.0"


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        pytest.param([SENT, RAN, OK], None, id="answered"),
        pytest.param([SENT, "E a.1.0 WorkerLostError-not-run 11.0"], None, id="not-run"),
        pytest.param([SENT, RAN, "E a.1.0 WorkerLostError 11.0"], None, id="may-have-run-and-did"),
        pytest.param([SENT, "E a.1.0 WorkerLostError 11.0"], None, id="may-have-run-and-did-not"),
        pytest.param(["S killed.2.0 call b 10.0", "X killed.2.0"], None, id="caller-killed"),
        pytest.param([SENT, RAN, RAN, OK], "ran more than once", id="ran-twice"),
        pytest.param([SENT, RAN, OK, OK], "ended more than once", id="ended-twice"),
        pytest.param([SENT, RAN], "has no end", id="no-end"),
        pytest.param([SENT, OK], "without having run", id="answered-by-nobody"),
        pytest.param([SENT, RAN, "E a.1.0 WorkerLostError-not-run 11.0"], "said not to have run", id="ran-after-all"),
        pytest.param([RAN], "never sent", id="out-of-nowhere"),
        pytest.param([SENT, RAN, OK, "W 5 instead of 3"], "wrong answer: 5 instead of 3", id="wrong"),
        pytest.param([SENT, RAN, "E a.1.0 RRefError 100.0"], None, id="explained"),
        pytest.param(["S a.1.0 call b 90.0", RAN, "E a.1.0 RRefError 100.0"], "there was no fault", id="unexplained"),
        pytest.param(["S a.1.0 call short b 90.0", "E a.1.0 RpcTimeoutError 90.1"], None, id="asked-for"),
    ],
)
def test_what_does_not_add_up_is_found(tmp_path: Path, lines: list[str], complaint: str | None):
    write(tmp_path, *lines)
    findings = Findings(windows=[(9.0, 10.0)], killed={"killed.2"})
    found = Report(1, 60.0, read_books(tmp_path), findings, []).complaints
    if complaint is None:
        assert found == []
    else:
        assert len(found) == 1
        assert complaint in found[0]


def test_a_fault_explains_what_comes_soon_after_it():
    findings = Findings(windows=[(10.0, 12.0)])
    assert findings.explains(9.0, 10.5)
    assert findings.explains(12.0 + RECOVERY_S - 0.1, 99.0)
    assert not findings.explains(1.0, 9.9)
    assert not findings.explains(12.0 + RECOVERY_S + 0.1, 99.0)


def test_what_is_left_in_the_end_is_complained_of(tmp_path: Path):
    write(tmp_path, SENT, RAN, OK)
    findings = Findings(
        left={"a": {"rrefs": ["one"]}, "b": {}},
        codes=[("a", "leave", 0), ("b", "SIGTERM", 1)],
        memory={"a.1": [(float(second), (100 + second) << 20) for second in range(0, 200, 2)]},
    )
    found = Report(1, 60.0, read_books(tmp_path), findings, ["run/x.sock"]).complaints
    assert len(found) == 4
    assert "a has left: {'rrefs': ['one']}" in found[0]
    assert "b ended with 1 after SIGTERM" in found[1]
    assert "run/x.sock" in found[2]
    assert "memory of a.1 grew from" in found[3]


async def test_the_ledger_notes_how_calls_end(tmp_path: Path):
    ledger = Ledger(tmp_path, "a", 1)
    errors = [
        arpc.WorkerLostError("x", "b", may_have_run=False),
        arpc.WorkerLostError("x", "b"),
        arpc.OverloadedError("x"),
        arpc.ShutdownError("this worker was shut down before the call ended"),
        LookupError("x"),
        asyncio.CancelledError(),
    ]
    with ledger.call("call", "b") as token:
        ledger.ran(token)
    for error in errors:
        with pytest.raises(type(error)), ledger.call("call", "b"):
            raise error
    nested = arpc.WorkerLostError("x", "c", may_have_run=False)
    nested.__cause__ = arpc.RemoteTraceback("b", "")
    with pytest.raises(arpc.WorkerLostError), ledger.call("call", "b"):
        raise nested
    outcomes = [call.outcome for call in read_books(tmp_path).calls.values()]
    assert outcomes == [
        "ok",
        "WorkerLostError-not-run",
        "WorkerLostError",
        "OverloadedError-not-run",
        "ShutdownError",
        "LookupError",
        "cancelled",
        "WorkerLostError",
    ]
