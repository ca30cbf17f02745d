"""Reads the event logs of all processes, and checks for each call that it ended once and ran at most once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from sys import intern

from scripts.soak.ledger import NOT_RUN, PASSED_ON

__all__ = ["Call", "Records", "Stall", "caller_of", "read_records", "worker_of"]

UNOBSERVED = ("rref-fetch", "train-backward")
"""Kinds of call that run no function of the soak, so that no event shows whether they ran."""
RREF_METHODS = ("rref-use", "rref-use-chain", "rref-use-untimed", "rref-method-calls-on")
"""Calls of methods of an RRef's value. None of those methods uses another RRef."""

IN_THREADS = ("nested-in-thread",)
"""Calls that a thread waits for. A process that receives SIGTERM does not wait for its threads."""

_STARVED = 0.5
"""A worker that got no CPU for more than this fraction of the time of a call may be why it did not end."""


@dataclass(slots=True)
class Call:
    """One call, from the events of its caller and its callee."""

    kind: str = ""
    to: str = ""
    others: tuple[str, ...] = ()
    sent_at: float = 0.0
    ended_at: float = 0.0
    ends: tuple[str, ...] = ()
    flags: str = ""
    lost: str = ""
    """The worker that was lost according to the error; empty if none was."""
    ran_on: tuple[str, ...] = ()
    """The process (``name.start``) of each run."""

    @property
    def outcome(self) -> str:
        return self.ends[0] if self.ends else ""

    @property
    def is_ok(self) -> bool:
        return self.outcome == "ok"

    @property
    def says_not_run(self) -> bool:
        return NOT_RUN in self.flags

    @property
    def was_passed_on(self) -> bool:
        """The error arrived from the callee; the call that failed first has a record of its own."""
        return PASSED_ON in self.flags

    @property
    def seconds(self) -> float:
        return self.ended_at - self.sent_at


@dataclass(frozen=True, slots=True)
class Stall:
    """A time in which the event loop of a process did not run."""

    process: str
    begin: float
    end: float
    cpu_s: float


@dataclass
class Records:
    """The events of all processes."""

    calls: dict[str, Call] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    children: list[tuple[str, int]] = field(default_factory=list)
    """Children that handlers forked: the process of the handler, and the pid of the child."""

    def complaints(self, killed: AbstractSet[str], terminated: AbstractSet[str] = frozenset()) -> list[str]:
        """Return the calls that break a promise. ``killed``: processes (``name.start``) that could not log an end.

        ``terminated``: those that received a SIGTERM, whose threads may not have logged one.
        """
        found = [f"wrong result: {text}" for text in self.wrong]
        for token, call in self.calls.items():
            problem = _problem(token, call, killed | terminated if call.kind in IN_THREADS else killed)
            if problem and not (call.outcome == "hung" and self.is_starved(token, call)):
                found.append(f"{describe_call(token, call)} {problem}")
        return found

    def is_starved(self, token: str, call: Call) -> bool:
        """Whether a worker that a call depends on got no CPU for most of its time, so that it may not have hung."""
        involved = {worker_of(caller_of(token)), call.to, *call.others}
        return any(self.starved_s(worker, call.sent_at, call.ended_at) > _STARVED * call.seconds for worker in involved)

    def starved_s(self, worker: str, begin: float, end: float) -> float:
        """Return how long the loop of a worker was stalled between two times without using the CPU."""
        waited_s = 0.0
        for stall in self.stalls:
            overlap_s = min(stall.end, end) - max(stall.begin, begin)
            if overlap_s > 0 and worker_of(stall.process) == worker:
                waited_s += overlap_s - min(overlap_s, stall.cpu_s)
        return waited_s

    def outcomes(self) -> dict[str, Counter[str]]:
        """Count the outcomes of calls by kind. ``not-run`` marks errors that guarantee that the call did not run."""
        made: dict[str, Counter[str]] = {}
        for call in self.calls.values():
            outcome = call.outcome or "caller-killed"
            made.setdefault(call.kind, Counter())[f"{outcome}-not-run" if call.says_not_run else outcome] += 1
        return made


def _problem(token: str, call: Call, killed: AbstractSet[str]) -> str:  # noqa: PLR0911 - one return for each promise
    if not call.kind:
        return "ran but was never sent"
    if len(call.ran_on) > 1:
        return "ran more than once"
    if len(call.ends) > 1:
        return "ended more than once"
    if not call.ends:
        return "" if caller_of(token) in killed else "has no end, and its caller was not killed"
    if call.outcome == "hung":
        return f"hung: the soak ended it after {call.seconds:.0f} s"
    if call.is_ok and not call.ran_on and call.kind not in UNOBSERVED:
        return "was answered without having run"
    if call.says_not_run and call.ran_on:
        return "ran, and its error says may_have_run=False"
    if call.outcome == "OwnerLostError" and call.kind in RREF_METHODS and call.lost != call.to:
        return f"ended with OwnerLostError for {call.lost}, which is not the owner"
    return ""


def describe_call(token: str, call: Call) -> str:
    """Describe a call in one line."""
    outcome = " and ".join(call.ends) or "never"
    about = f"{call.kind} to {call.to}, ended {outcome}, ran {len(call.ran_on)} times"
    return f"call {token} ({about}, sent at {call.sent_at:.3f})"


def caller_of(token: str) -> str:
    """Return the process that made a call, as ``name.start``."""
    return token.rpartition(".")[0]


def worker_of(process: str) -> str:
    """Return the name of the worker of a process (``name.start``)."""
    return process.rpartition(".")[0]


def read_records(directory: Path) -> Records:
    """Read the event logs of all processes."""
    records = Records()
    for path in sorted(directory.glob("*.ledger")):
        # the last line of a process that was killed may be cut short
        for line in path.read_text(errors="replace").split("\n")[:-1]:
            _read_line(records, path.stem, line)
    return records


def _read_line(records: Records, process: str, line: str) -> None:
    event, _, rest = line.partition(" ")
    if event == "W":
        records.wrong.append(rest)
        return
    fields = rest.split(" ")
    if event == "P":
        begin, end, cpu_s = map(float, fields)
        records.stalls.append(Stall(process, begin, end, cpu_s))
        return
    if event == "C":
        records.children.append((process, int(fields[0])))
        return
    call = records.calls.get(fields[0])
    if call is None:
        call = records.calls[fields[0]] = Call()
    if event == "X":
        call.ran_on += (process,)
    elif event == "S":
        _, kind, to, others, sent_at = fields
        call.kind, call.to = intern(kind), intern(to)  # a long soak has millions of calls
        call.others = () if others == "-" else tuple(map(intern, others.split(",")))
        call.sent_at = float(sent_at)
    else:
        _, outcome, flags, lost, ended_at = fields
        call.ends += (intern(outcome),)
        call.flags = "" if flags == "-" else intern(flags)
        call.lost = "" if lost == "-" else intern(lost)
        call.ended_at = float(ended_at)
