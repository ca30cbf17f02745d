"""The event log: what it says of the end of a call."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import arpc
from scripts.soak.ledger import HungCallError, Ledger, describe
from scripts.soak.operations import base
from scripts.soak.records import read_records


def passed_on(error: Exception) -> Exception:
    """The error as it is after it came from a callee."""
    error.__cause__ = arpc.RemoteTraceback("b", "")
    return error


@pytest.mark.parametrize(
    ("error", "description"),
    [
        (None, "ok - -"),
        (arpc.WorkerLostError("x", "b", may_have_run=False), "WorkerLostError n b"),
        (arpc.WorkerLostError("x", "b"), "WorkerLostError - b"),
        (arpc.OwnerLostError("x", "c"), "OwnerLostError - c"),
        (passed_on(arpc.WorkerLostError("x", "c", may_have_run=False)), "WorkerLostError np c"),
        (passed_on(LookupError("x")), "LookupError p -"),
        (arpc.errors.not_run(arpc.OverloadedError("x")), "OverloadedError n -"),
        (arpc.ShutdownError("x"), "ShutdownError - -"),
        (asyncio.CancelledError(), "cancelled - -"),
        (HungCallError("x"), "hung - -"),
        (passed_on(HungCallError("x")), "HungCallError p -"),
    ],
)
def test_an_end_says_what_the_error_says(error: BaseException | None, description: str):
    assert describe(error) == description


def test_events_of_all_processes_are_put_together(tmp_path: Path):
    caller, callee = Ledger(tmp_path, "a", 1), Ledger(tmp_path, "b", 3)
    token = caller.begin("rref-pass", "b", ("c", "d"))
    callee.ran(token)
    callee.stalled(10.0, 11.5, 0.25)
    callee.forked(4321, 2.0)
    caller.end(token, arpc.OwnerLostError("x", "c"))
    caller.wrong("two\nlines")
    records = read_records(tmp_path)
    (call,) = records.calls.values()
    assert (call.kind, call.to, call.others, call.ran_on) == ("rref-pass", "b", ("c", "d"), ("b.3",))
    assert (call.outcome, call.lost, call.says_not_run, call.was_passed_on) == ("OwnerLostError", "c", False, False)
    assert records.wrong == ["two lines"]
    assert records.children == [("b.3", 4321)]
    assert [(stall.process, stall.end - stall.begin) for stall in records.stalls] == [("b.3", 1.5)]


async def test_a_call_that_hangs_is_ended_and_reported_by_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(base, "HANG_S", 0.01)
    client = base.Client(Ledger(tmp_path, "a", 1), "seed")
    with pytest.raises(HungCallError, match=r"a\.1\.0"):
        async with client.call("call", "b"):
            await asyncio.Event().wait()
    (complaint,) = read_records(tmp_path).complaints(set())
    assert "call a.1.0 (call to b" in complaint
    assert "hung" in complaint


async def test_a_timeout_of_the_call_itself_is_no_hang(tmp_path: Path):
    client = base.Client(Ledger(tmp_path, "a", 1), "seed")
    with pytest.raises(arpc.RpcTimeoutError):
        async with client.call("call", "b"):
            raise arpc.RpcTimeoutError("x")
    assert [call.outcome for call in read_records(tmp_path).calls.values()] == ["RpcTimeoutError"]
