"""The bars that arpc must pass, as data, and the verdicts on the results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from arpc.bench.rounds import Results
from arpc.bench.row import PINNED, SUBJECT
from arpc.bench.rows import shapes
from arpc.bench.shapes import SPREAD_AT_MOST

__all__ = ["TARGETS", "Bound", "Target", "Verdict", "judge"]

TRANSFORMER_SPEEDUP: Final = 1.5

Against = Literal["floor", "torch", "torch-tcp", "itself"]
Outcome = Literal["pass", "miss", "stated", "not measured"]


@dataclass(frozen=True, slots=True)
class Bound:
    """A share of the opponent's time that no runtime can shorten, from which on a speed-up is out of reach."""

    what: str
    row: str
    """The key of the row that has the share."""
    at_least: float


@dataclass(frozen=True, slots=True)
class Target:
    """One bar: a quotient of figures against the floor, a speed-up against opponents, or the figure itself."""

    what: str
    row: str
    """The key of the row that decides it."""
    against: Against
    at_least: float | None = None
    at_most: float | None = None
    bound: Bound | None = None
    """The bound that excuses a miss; None if nothing does."""

    @property
    def bar(self) -> str:
        sign, limit = ("<=", self.at_most) if self.at_most is not None else (">=", self.at_least)
        if limit is None:
            return "stated"
        match self.against:
            case "floor":
                return f"{sign} {limit:g}x the floor"
            case "itself":
                return f"{sign} {limit:g}"
            case opponent:
                unless = f", or {self.bound.what} is {self.bound.at_least:.0%} of its time" if self.bound else ""
                return f"{sign} {limit:g}x as fast as {opponent}{unless}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one target."""

    target: Target
    measured: float | None
    outcome: Outcome
    disturbed: bool = False
    """True if other programs were too busy for the verdict to be trusted."""

    @property
    def reached(self) -> float:
        """The fraction of its bar that was reached: less than 1 is a miss."""
        if self.measured is None or (self.target.at_least is None and self.target.at_most is None):
            return 1.0
        if self.target.at_least is not None:
            return self.measured / self.target.at_least
        return (self.target.at_most or 0.0) / self.measured if self.measured else 1.0


def judge(results: Results) -> Iterator[Verdict]:
    """Yield a verdict on every target, in order."""
    rows = {row.key: row for row in results.rows}
    for target in TARGETS:
        row = rows.get(target.row)
        # The quotient with itself is 1; that comparison only shows whether rounds were disturbed.
        column = SUBJECT if target.against == "itself" else target.against
        comparison = results.comparison(row, column) if row is not None else None
        if row is None or comparison is None:
            yield Verdict(target, None, "not measured")
            continue
        measured = comparison.quotient if target.against == "floor" else comparison.speedup
        if target.against == "itself":
            measured = results.median(row, SUBJECT) or 0.0
        outcome = _outcome(target, measured)
        if outcome == "miss" and target.bound is not None:
            share = results.median(rows[target.bound.row], target.against) if target.bound.row in rows else None
            outcome = "pass" if share is not None and share >= target.bound.at_least else outcome
        yield Verdict(target, measured, outcome, comparison.disturbed)


def _outcome(target: Target, measured: float) -> Outcome:
    if target.at_least is not None:
        return "pass" if measured >= target.at_least else "miss"
    if target.at_most is not None:
        return "pass" if measured <= target.at_most else "miss"
    return "stated"


TARGETS: Final[tuple[Target, ...]] = (
    Target("small call, async def, p50, same CPU", "call/async/unix/same", "floor", at_most=1.3),
    Target("small call, async def, p50, same CPU", "call/async/unix/same", "torch", at_least=12),
    Target("small call, async def, p50, split CPUs", "call/async/unix/split", "torch", at_least=12),
    Target("calls/s, 64 in flight, async def, same", "rate/async/unix/same/64", "floor", at_least=0.95),
    Target("calls/s, 64 in flight, async def, split", "rate/async/unix/split/64", "floor", at_least=0.95),
    Target("calls/s, 64 in flight, async def, same", "rate/async/unix/same/64", "torch", at_least=12),
    Target("calls/s, 64 in flight, async def, split", "rate/async/unix/split/64", "torch", at_least=12),
    Target("small call, def, p50, same CPU", "call/def/unix/same", "floor", at_most=1.6),
    Target("calls/s, 64 in flight, def, same", "rate/def/unix/same/64", "floor", at_least=1.2),
    Target("calls/s, 64 in flight, def, split", "rate/def/unix/split/64", "floor", at_least=1.2),
    Target("echo of 16 floats, p50, same CPU", "floats16/p50/same", "torch", at_least=6),
    Target("echo of 16 floats, p50, split CPUs", "floats16/p50/split", "torch", at_least=10),
    Target("echo of 16 floats, calls/s, same", "floats16/rate/same", "torch", at_least=12),
    Target("echo of 16 floats, calls/s, split", "floats16/rate/split", "torch", at_least=12),
    Target("dict of 50 small tensors, echo, p50, same", "dict50/p50/same", "torch", at_least=5),
    Target("dict of 50 small tensors, echo, p50, split", "dict50/p50/split", "torch", at_least=5),
    Target("send, same host, warm, 1 MB", "send/1MB/unix", "torch", at_least=2.5),
    Target("send, same host, warm, 16 MB", "send/16MB/unix", "torch", at_least=1.4),
    Target("send, same host, warm, 64 MB", "send/64MB/unix", "torch", at_least=3.5),
    Target("send, same host, warm, 64 MB, of libc memmove", "send-of-memmove/64MB", "floor", at_least=0.8),
    Target("send, same host, cold, 64 MB", "send-cold/64MB/unix", "torch", at_least=1.2),
    Target("unix socket without shared memory, 64 MB", "send/64MB/socket", "torch", at_least=1.4),
    Target("send, TCP, 64 MB", "send/64MB/tcp", "torch-tcp", at_least=1.5),
    Target("echo, TCP, 64 MB", "echo/64MB/tcp", "torch-tcp", at_least=1.0),
    Target("small call p50 while 64 MB transfers run, times idle", "loaded/times_idle", "itself", at_most=10),
    Target("blocking rpc_sync through the drop-in, def, unpinned", "drop-in/call/free", "torch", at_least=5),
    Target("blocking rpc_sync through the drop-in, def, same CPU", "drop-in/call/same", "torch", at_least=5),
    Target("remote() + to_here(), p50, same CPU", "rref/latency/same", "torch", at_least=5),
    Target("remote() + to_here(), p50, split CPUs", "rref/latency/split", "torch", at_least=8),
    Target("chain of ten remote(): one round trip and ten handlers", "rref/chain/round_trips", "itself"),
    Target("fetch of 256 MB through an RRef, as a plain send", "rref/fetch/256MB", "floor", at_least=0.9),
    Target("autograd, one remote op and back, p50, same CPU", "autograd/op/same", "torch", at_least=3),
    Target("autograd, one remote op and back, p50, split CPUs", "autograd/op/split", "torch", at_least=4),
    Target("autograd, 8 contexts at once, same CPU", "autograd/contexts/same", "torch", at_least=3),
    Target("autograd, a chain of 3 workers, same CPU", "autograd/chain/same", "torch", at_least=3),
    Target("autograd, a fan-out to 8 workers, same CPU", "autograd/fan-out/same", "torch", at_least=3),
    Target("autograd, 1,000 nodes: share outside of torch's engine", "autograd/outside/1000", "itself", at_most=0.25),
    Target("100,000 calls in flight complete, calls/s", "flood/calls_per_s", "itself"),
    Target("100,000 calls in flight, caller's bytes per call", "flood/caller_bytes_per_call", "itself"),
    Target("100,000 calls in flight, callee's growth in MB", "flood/callee_growth_mb", "itself"),
    Target(
        "slow reader: callee's growth in MB, within its window", "slow-reader/callee_growth_mb", "itself", at_most=90
    ),
    Target("profiler off, tracing off: share of a small call", "profiler/off/share", "itself", at_most=0.02),
    Target("per-call cost with 64 workers, of that with 2", "workers/growth", "floor", at_most=1.25),
    *(Target(row.title, row.key, "torch", at_least=speedup) for row, speedup in shapes.goals()),
    *(Target(row.title, row.key, "floor", at_most=times) for row, times in shapes.floors()),
    *(Target(f"spread: {row.title}", row.key, "floor", at_most=SPREAD_AT_MOST) for row in shapes.spread()),
    *(Target(row.title, row.key, "itself", at_most=limit_us) for row, limit_us in shapes.growth()),
    *(
        Target(
            f"autograd, a transformer of 4 blocks, 100 tensors in flight, {placement}",
            f"autograd/transformer/p50_us/{placement}",
            "torch",
            at_least=TRANSFORMER_SPEEDUP,
            bound=Bound("arithmetic", f"autograd/transformer/arithmetic/{placement}", 1 / TRANSFORMER_SPEEDUP),
        )
        for placement in PINNED
    ),
)
