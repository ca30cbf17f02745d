"""The verdict on a trial: tables for people, and everything that does not add up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, Final

from scripts.soak.director import Findings
from scripts.soak.ledger import Books

__all__ = ["Report"]

MIB: Final = 1 << 20
_LONG_LIFE_S: Final = 60.0
_MAY_GROW: Final = 1.15
_MAY_GROW_BYTES: Final = 24 * MIB
_SHOWN: Final = 25
_POINTS: Final = 40
# What may happen to a call without any fault: its caller asked for it
_ASKED_FOR: Final = {
    ("call cancelled", "CallCancelledError"),
    ("call short", "RpcTimeoutError"),
}
_EXPECTED_CODES: Final = {"leave": 0, "SIGTERM": -15}


@dataclass
class Report:
    """One trial, judged."""

    seed: int
    seconds: float
    books: Books
    findings: Findings
    sockets: list[str]

    @cached_property
    def complaints(self) -> list[str]:
        """Everything that is not as promised; nothing, then it has passed."""
        found = self.books.complaints(self.findings.killed)
        found += self._unexplained()
        found += [f"{name} has left: {left}" for name, left in self.findings.left.items() if left]
        found += [
            f"{name} ended with {code} after {how}"
            for name, how, code in self.findings.codes
            if code != _EXPECTED_CODES[how]
        ]
        found += [f"a socket is left: {path}" for path in self.sockets]
        found += [
            f"the memory of {start} grew from {begin / MIB:.0f} to {end / MIB:.0f} MiB"
            for start, begin, end in self._memory()
            if end > begin * _MAY_GROW and end > begin + _MAY_GROW_BYTES
        ]
        return found

    def _unexplained(self) -> list[str]:
        found = []
        for token, call in self.books.calls.items():
            kind, outcome = call.kind, call.outcome
            if outcome in {"", "ok", "cancelled"} or (kind, outcome) in _ASKED_FOR:
                continue
            if not self.findings.explains(call.sent_at, call.ended_at):
                found.append(f"call {token} ({kind} to {call.to}) ended with {outcome}, and there was no fault")
        return found

    def _memory(self) -> list[tuple[str, int, int]]:
        """Of each process that lived long: what it had when it had warmed up, and in the end."""
        made = []
        for start, samples in self.findings.memory.items():
            if not samples or samples[-1][0] - samples[0][0] < _LONG_LIFE_S:
                continue
            sizes = [size for _, size in samples]
            quarter = len(sizes) // 4
            made.append((start, int(median(sizes[quarter : 2 * quarter])), int(median(sizes[-quarter:]))))
        return made

    def figures(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "faults": dict(self.findings.faults),
            "outcomes": {kind: dict(outcomes) for kind, outcomes in self.books.outcomes().items()},
            "memory": self._memory(),
            "memory_mib": {
                start: [size // MIB for _, size in samples[:: max(1, len(samples) // _POINTS)]]
                for start, samples in self.findings.memory.items()
            },
            "complaints": self.complaints,
        }

    def text(self) -> str:
        calls = self.books.calls.values()
        lines = [f"seed {self.seed}, {self.seconds:.0f} s", "", "| fault | times |", "| --- | --- |"]
        lines += [f"| {fault} | {times} |" for fault, times in sorted(self.findings.faults.items())]
        lines += [
            "",
            "| kind of call | sent | ok | error | caller killed | ran twice |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for kind, outcomes in [*sorted(self.books.outcomes().items()), ("all", self._all())]:
            of_kind = [call for call in calls if kind in {"all", call.kind}]
            lost = outcomes["caller-killed"]
            errors = outcomes.total() - outcomes["ok"] - lost
            twice = sum(call.runs > 1 for call in of_kind)
            lines.append(f"| {kind} | {outcomes.total():,} | {outcomes['ok']:,} | {errors:,} | {lost:,} | {twice} |")
        lines += ["", "| error | times |", "| --- | --- |"]
        errors_by_name = Counter(
            {name: times for name, times in self._all().items() if name not in {"ok", "caller-killed"}}
        )
        lines += [f"| {name} | {times:,} |" for name, times in errors_by_name.most_common()]
        lines += ["", "| process | resident MiB warmed up | in the end |", "| --- | --- | --- |"]
        lines += [f"| {start} | {begin / MIB:.0f} | {end / MIB:.0f} |" for start, begin, end in self._memory()]
        complaints = self.complaints
        lines += ["", f"{len(complaints)} complaints" if complaints else "everything adds up"]
        lines += complaints[:_SHOWN]
        return "\n".join(lines)

    def _all(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for outcomes in self.books.outcomes().values():
            total += outcomes
        return total
