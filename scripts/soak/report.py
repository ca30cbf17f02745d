"""The result of a soak: tables, figures, and all broken promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from scripts.soak.findings import RECOVERY_S, FaultWindow, FaultWindows, Findings
from scripts.soak.memory import MIB, MemoryTrend, trend_of
from scripts.soak.records import Call, Records, caller_of, describe_call, worker_of
from scripts.soak.remains import too_large
from scripts.soak.workers import OPTIONS

__all__ = ["Report"]

_SHOWN: Final = 4
_WRITTEN: Final = 200
_POINTS: Final = 60
# Errors that callers cause on purpose, by timeouts and cancellation, or that handlers of the soak raise
_ASKED_FOR: Final = {
    ("call-cancelled", "CallCancelledError"),
    ("call-short", "RpcTimeoutError"),
}
_DELIBERATE: Final = "DeliberateError"
_EXPECTED_CODES: Final = {"leave": 0, "SIGTERM": -15}
_SHORT_STALL_S: Final = 1.0
_STARVED: Final = 0.25
"""Memory is not judged if the loop got no CPU for more than this fraction of the time. Faults alone take a tenth."""
NOTICE_S: Final = 2.0
"""Seconds within which a death must be noticed. Silence is noticed only after the heartbeat timeout of 3 s."""


@dataclass
class Report:
    """One soak, with all checks."""

    seed: int
    seconds: float
    records: Records
    findings: Findings
    sockets: list[str]

    # -- checks

    @cached_property
    def complaints(self) -> dict[str, list[str]]:
        """All broken promises, by promise; if there are none, the soak has passed."""
        findings = self.findings
        found = {
            "calls": self.records.complaints(findings.unfinished, findings.terminated),
            "errors without a fault": [
                f"{describe_call(token, call)} and no fault explains it" for token, call in self._unexplained
            ],
            "owners that were not lost": list(self._false_owner_losses()),
            "deaths noticed late": list(self._late_notices()),
            "workers that crashed": [f"{process} ended by itself with {code}" for process, code in findings.crashes],
            "exit codes": [
                f"{name} ended with {code} after {how}"
                for name, how, code in findings.codes
                if code != _EXPECTED_CODES[how]
            ],
            "left in the end": [
                f"{name} has {what}: {value}" for name, left in findings.left.items() for what, value in left.items()
            ],
            "tables that grow": [
                f"{name} has {size} entries in {table}"
                for name, tables in findings.tables.items()
                for table, size in too_large(tables).items()
            ],
            "memory": [
                f"{trend.process} grew from {trend.begin_bytes / MIB:.0f} to {trend.end_bytes / MIB:.0f} MiB"
                for trend in self.memory
                if not trend.is_flat and not self._is_starved(trend)
            ],
            "sockets": [f"a socket is left: {path}" for path in self.sockets],
            "processes": [f"{findings.orphans} children of handlers did not end"] if findings.orphans else [],
            "the soak itself": findings.failures,
        }
        return {promise: problems for promise, problems in found.items() if problems}

    @cached_property
    def _windows(self) -> FaultWindows:
        return FaultWindows([*self.findings.windows, *self._stalls()])

    def _stalls(self) -> Iterator[FaultWindow]:
        for stall in self.records.stalls:
            # a stall shorter than the heartbeat timeout delays calls, and fails those with short timeouts
            is_short = stall.end - stall.begin < OPTIONS.heartbeat_timeout / 2
            recovery_s = _SHORT_STALL_S if is_short else RECOVERY_S
            yield FaultWindow(worker_of(stall.process), stall.begin, stall.end, recovery_s)

    def _is_explained(self, token: str, call: Call) -> bool:
        return self._windows.cover(call.sent_at, call.ended_at, (worker_of(caller_of(token)), call.to, *call.others))

    @cached_property
    def _unexplained(self) -> list[tuple[str, Call]]:
        """Calls that ended with an error although no worker that they depend on had a fault."""
        found = []
        for token, call in self.records.calls.items():
            outcome = call.outcome
            if outcome in {"", "ok", "cancelled", "hung", _DELIBERATE} or (call.kind, outcome) in _ASKED_FOR:
                continue
            if call.was_passed_on:
                # the call that failed first is checked separately; here it is enough that there was a fault
                if not self._windows.cover(call.sent_at, call.ended_at):
                    found.append((token, call))
            elif not self._is_explained(token, call):
                found.append((token, call))
        return found

    def _false_owner_losses(self) -> Iterator[str]:
        for token, call in self.records.calls.items():
            if call.outcome != "OwnerLostError" or call.was_passed_on:
                continue
            if not self._windows.cover(call.sent_at, call.ended_at, (worker_of(caller_of(token)), call.lost)):
                yield f"{describe_call(token, call)}, and {call.lost} had no fault"

    def _late_notices(self) -> Iterator[str]:
        """Yield calls whose callee was killed while it ran them, and that ended long after that."""
        killed_at = self.findings.killed_at
        # the consequences of earlier faults do not count here
        windows = FaultWindows(window._replace(recovery_s=0.0) for window in [*self.findings.windows, *self._stalls()])
        for token, call in self.records.calls.items():
            died_at = killed_at.get(call.ran_on[0]) if call.ran_on and call.ends and not call.is_ok else None
            if died_at is None or not call.sent_at < died_at < call.ended_at - NOTICE_S:
                continue
            # a caller that was stopped or cut off itself could not notice
            if not windows.cover(died_at, call.ended_at, (worker_of(caller_of(token)),)):
                yield f"{describe_call(token, call)} ended {call.ended_at - died_at:.1f} s after its callee was killed"

    # -- figures

    @cached_property
    def memory(self) -> list[MemoryTrend]:
        """The memory trend of each process that lived long enough."""
        trends = [trend_of(process, samples) for process, samples in self.findings.memory.items()]
        return [trend for trend in trends if trend is not None]

    def _is_starved(self, trend: MemoryTrend) -> bool:
        """Whether a process got so little CPU that its memory shows a backlog, and not a leak."""
        end = self.findings.memory[trend.process][-1][0]
        starved_s = self.records.starved_s(worker_of(trend.process), end - trend.seconds, end)
        return starved_s > _STARVED * trend.seconds

    def _not_judged(self) -> Iterator[str]:
        """Yield the calls and processes that could not be judged because the machine was overloaded."""
        calls = sum(
            call.outcome == "hung" and self.records.is_starved(token, call)
            for token, call in self.records.calls.items()
        )
        if calls:
            yield f"not judged: {calls} calls that did not end in time on workers that got no CPU for most of it"
        for trend in self.memory:
            if not trend.is_flat and self._is_starved(trend):
                yield (
                    f"not judged: the memory of {trend.process}, {trend.begin_bytes / MIB:.0f} to "
                    f"{trend.end_bytes / MIB:.0f} MiB, which got too little CPU"
                )

    @cached_property
    def worst_s(self) -> dict[str, float]:
        """The longest time of a successful call of each kind, without a fault of any worker that it depends on."""
        worst: dict[str, float] = {}
        for token, call in self.records.calls.items():
            if call.is_ok and call.seconds > worst.get(call.kind, 0.0) and not self._is_explained(token, call):
                worst[call.kind] = call.seconds
        return worst

    def _operations(self, process: str, since: float) -> int:
        """Count the calls that a process made or ran since a time."""
        return sum(
            call.sent_at >= since and (process in call.ran_on or caller_of(token) == process)
            for token, call in self.records.calls.items()
        )

    def _memory_figures(self) -> Iterator[dict[str, Any]]:
        for trend in self.memory:
            operations = self._operations(trend.process, self.findings.memory[trend.process][-1][0] - trend.seconds)
            yield {
                "process": trend.process,
                "seconds": round(trend.seconds),
                "operations": operations,
                "begin_bytes": trend.begin_bytes,
                "end_bytes": trend.end_bytes,
                "bytes_per_1000_operations": round(trend.per_thousand(operations)),
                "is_flat": trend.is_flat,
            }

    @cached_property
    def _kinds(self) -> dict[str, dict[str, Any]]:
        unexplained = Counter(call.kind for _, call in self._unexplained)
        return {
            kind: {
                "count": outcomes.total(),
                "outcomes": dict(outcomes),
                "unexplained_errors": unexplained[kind],
                "worst_s": round(self.worst_s.get(kind, 0.0), 3),
            }
            for kind, outcomes in sorted(self.records.outcomes().items())
        }

    def figures(self) -> dict[str, Any]:
        """Return the whole report as plain data."""
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "faults": dict(self.findings.faults),
            "kinds": self._kinds,
            "memory": list(self._memory_figures()),
            "memory_mib": {
                process: [size // MIB for _, size in samples[:: max(1, len(samples) // _POINTS)]]
                for process, samples in self.findings.memory.items()
            },
            "tables": self.findings.tables,
            "stalls": [
                {"process": stall.process, "seconds": round(stall.end - stall.begin, 3), "cpu_s": stall.cpu_s}
                for stall in self.records.stalls
            ],
            "children": len(self.records.children),
            "complaints": {promise: problems[:_WRITTEN] for promise, problems in self.complaints.items()},
            "summary": self.summary,
        }

    @cached_property
    def summary(self) -> str:
        """The soak in one line."""
        calls = self.records.calls.values()
        said_not_run = sum(call.says_not_run for call in calls)
        problems = sum(map(len, self.complaints.values()))
        return (
            f"seed {self.seed}: {len(self.records.calls):,} calls in {self.seconds:.0f} s, "
            f"{self.findings.faults.total()} faults, {len(self.records.children)} forked children; "
            f"{sum(len(call.ran_on) > 1 for call in calls)} ran twice, "
            f"{sum(len(call.ends) > 1 for call in calls)} ended twice, "
            f"{sum(call.outcome == 'hung' for call in calls)} hung, "
            f"{sum(call.says_not_run and bool(call.ran_on) for call in calls)} of {said_not_run:,} with "
            f"may_have_run=False ran; {len(self._unexplained)} errors without a fault; {problems} complaints"
        )

    # -- text

    def text(self) -> str:
        """Return the report as tables for the terminal."""
        lines = ["| fault | times |", "| --- | --- |"]
        lines += [f"| {fault} | {times} |" for fault, times in sorted(self.findings.faults.items())]
        lines += ["", *self._text_of_kinds(), "", "| error | times |", "| --- | --- |"]
        errors: Counter[str] = Counter()
        for kind in self._kinds.values():
            errors.update({name: times for name, times in kind["outcomes"].items() if name not in _NO_ERRORS})
        lines += [f"| {name} | {times:,} |" for name, times in errors.most_common()]
        lines += ["", *self._text_of_memory(), ""]
        if self.records.stalls:
            longest = max(self.records.stalls, key=lambda stall: stall.end - stall.begin)
            lines.append(
                f"event loops stood still {len(self.records.stalls)} times, {longest.process} longest: "
                f"{longest.end - longest.begin:.1f} s, of which it computed {longest.cpu_s:.1f} s"
            )
        lines += self._not_judged()
        for promise, problems in self.complaints.items():
            lines += ["", f"{promise}: {len(problems)}", *(f"  {problem[:600]}" for problem in problems[:_SHOWN])]
        lines += ["", "complaints: see above" if self.complaints else "everything is as promised", self.summary]
        return "\n".join(lines)

    def _text_of_kinds(self) -> Iterator[str]:
        yield "| kind of call | sent | ok | errors | caller killed | without a fault | worst, no fault |"
        yield "| --- | --- | --- | --- | --- | --- | --- |"
        for kind, figures in self._kinds.items():
            outcomes = Counter(figures["outcomes"])
            lost = outcomes["caller-killed"]
            errors = outcomes.total() - outcomes["ok"] - lost
            yield (
                f"| {kind} | {outcomes.total():,} | {outcomes['ok']:,} | {errors:,} | {lost:,} | "
                f"{figures['unexplained_errors']} | {figures['worst_s']:.2f} s |"
            )

    def _text_of_memory(self) -> Iterator[str]:
        yield "| process | resident MiB after warm-up | in the end | operations | KiB per 1,000 operations |"
        yield "| --- | --- | --- | --- | --- |"
        for row in self._memory_figures():
            yield (
                f"| {row['process']} | {row['begin_bytes'] / MIB:.0f} | {row['end_bytes'] / MIB:.0f} | "
                f"{row['operations']:,} | {row['bytes_per_1000_operations'] / 1024:.1f} |"
            )


_NO_ERRORS: Final = {"ok", "caller-killed", "cancelled"}
