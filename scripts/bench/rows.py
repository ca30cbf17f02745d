"""What is compared: the table of rows. Each row has one figure of several systems, measured in the same way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Final, Literal

from scripts.bench.functions import Flavour
from scripts.bench.placement import Placement

__all__ = ["ROWS", "SUBJECT", "Cell", "Row", "Workload", "select"]

Setting = str | int | float
Transport = Literal["unix", "tcp"]

SUBJECT: Final = "arpc"
"""The column that is compared with all the others."""

MB: Final = 1_000_000
WINDOWS: Final = (1, 16, 64, 256)
BULK_SIZES_MB: Final = (1, 4, 16, 64, 256)
QUICK_BULK: Final = {
    "send/1MB/unix",
    "send/16MB/unix",
    "send/64MB/unix",
    "send-cold/64MB/unix",
    "send/64MB/tcp",
    "echo/64MB/tcp",
}


@dataclass(frozen=True, slots=True)
class Workload:
    """A measurement: the name of a method of the callers, and what it is told."""

    measure: str
    settings: tuple[tuple[str, Setting], ...]
    fresh: bool = False
    """It needs processes that have done nothing yet."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One system doing one workload at one placement. Rows that share a cell share its figures."""

    system: str
    workload: Workload
    placement: Placement = "free"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: a figure, and the cells that it is read from."""

    key: str
    section: str
    title: str
    metric: str
    unit: str
    better: Literal["lower", "higher"]
    cells: Mapping[str, Cell]
    """By column: `SUBJECT`, ``floor`` (compared as a plain quotient) and opponents (compared by speed)."""
    max_rounds: int | None = None
    in_quick: bool = True
    long: bool = False
    """Measured only when asked for: it takes minutes."""


def workload(measure: str, **settings: Setting) -> Workload:
    return Workload(measure, tuple(sorted(settings.items())))


def select(patterns: list[str], *, quick: bool, long: bool) -> list[Row]:
    """The rows whose key contains a pattern or matches it as a shell would; all if there is no pattern."""

    def wanted(row: Row) -> bool:
        if patterns:
            return any(pattern in row.key or fnmatch(row.key, pattern) for pattern in patterns)
        return (long or not row.long) and (row.in_quick or not quick)

    return [row for row in ROWS if wanted(row)]


def _three(
    make: Mapping[Flavour, Workload], flavour: Flavour, transport: Transport, placement: Placement
) -> dict[str, Cell]:
    """Both arpc and the floor at `placement`; torch, which gains nothing from pinning, as the kernel likes."""
    cells = {
        SUBJECT: Cell(f"arpc-{transport}", make[flavour], placement),
        "floor": Cell(f"floor-{transport}", make["def"], placement),
        "torch": Cell("torch", make["def"]),
    }
    if transport == "tcp":
        cells["torch-tcp"] = Cell("torch-tcp", make["def"])
    return cells


def _spoken(flavour: Flavour) -> str:
    return "async def" if flavour == "async" else "def"


def _latency_rows() -> Iterator[Row]:
    make = _by_flavour("latency", function="noop", payload="none")
    for transport in _transports():
        for flavour in _flavours():
            for placement in _pinned():
                yield Row(
                    key=f"call/{flavour}/{transport}/{placement}",
                    section="Small call, one after another: median latency",
                    title=f"{_spoken(flavour)}, {transport}, {placement}",
                    metric="p50_us",
                    unit="us",
                    better="lower",
                    cells=_three(make, flavour, transport, placement),
                    in_quick=transport == "unix",
                )


def _rate_rows() -> Iterator[Row]:
    for transport in _transports():
        for flavour in _flavours():
            for placement in _pinned():
                if (transport, placement) == ("tcp", "same"):
                    continue  # the unix rows show what one CPU does; the time is better spent on rounds
                for in_flight in WINDOWS:
                    make = _by_flavour("throughput", function="noop", payload="none", in_flight=in_flight)
                    yield Row(
                        key=f"rate/{flavour}/{transport}/{placement}/{in_flight}",
                        section="Small calls, a sliding window in flight: calls per second",
                        title=f"{_spoken(flavour)}, {transport}, {placement}, {in_flight} in flight",
                        metric="calls_per_s",
                        unit="/s",
                        better="higher",
                        cells=_three(make, flavour, transport, placement),
                        in_quick=in_flight == 64 and transport == "unix",
                    )


def _tensor_rows() -> Iterator[Row]:
    section = "Small tensors, echo"
    for payload, title in (("floats16", "16 floats"), ("dict50", "dict of 50 tensors of 16 floats")):
        make = _by_flavour("latency", function="echo", payload=payload)
        for placement in _pinned():
            yield Row(
                key=f"{payload}/p50/{placement}",
                section=section,
                title=f"{title}, p50, {placement}",
                metric="p50_us",
                unit="us",
                better="lower",
                cells=_three(make, "async", "unix", placement),
            )
        make = _by_flavour("throughput", function="echo", payload=payload, in_flight=64)
        for placement in _pinned():
            yield Row(
                key=f"{payload}/rate/{placement}",
                section=section,
                title=f"{title}, calls/s, 64 in flight, {placement}",
                metric="calls_per_s",
                unit="/s",
                better="higher",
                cells=_three(make, "async", "unix", placement),
                in_quick=payload == "floats16",
            )


def _bulk_rows() -> Iterator[Row]:
    for function, word in (("drop", "send"), ("echo", "echo")):
        for transport in _transports():
            for size_mb in BULK_SIZES_MB:
                yield _bulk_row(f"{word}/{size_mb}MB/{transport}", f"{word} {size_mb} MB", function, size_mb, transport)
    for transport in _transports():
        yield _bulk_row(f"send-cold/64MB/{transport}", "send 64 MB, cold", "keep", 64, transport)
    send = workload("bulk", function="drop", size_bytes=64 * MB)
    yield Row(
        key="send-of-memmove/64MB",
        section=_BULK_SECTION,
        title="send 64 MB, unix, warm; floor: libc memmove",
        metric="gib_per_s",
        unit="GiB/s",
        better="higher",
        cells={
            SUBJECT: Cell("arpc-unix", send),
            "floor": Cell("floor-unix", workload("memory_copy", size_bytes=64 * MB)),
        },
    )
    loaded = _by_flavour("latency_under_load", size_bytes=64 * MB)
    for metric, unit, title in (
        ("p50_us", "us", "small call p50 while 64 MB transfers run"),
        ("times_idle", "x idle", "the same, in multiples of the idle one"),
    ):
        yield Row(
            key=f"loaded/{metric}",
            section=_BULK_SECTION,
            title=title,
            metric=metric,
            unit=unit,
            better="lower",
            cells={SUBJECT: Cell("arpc-unix", loaded["async"]), "torch": Cell("torch-default", loaded["def"])},
        )


_BULK_SECTION: Final = "Large tensors, one after another, unpinned"


def _bulk_row(key: str, title: str, function: str, size_mb: int, transport: Transport) -> Row:
    transfer = workload("bulk", function=function, size_bytes=size_mb * MB)
    cells = {
        SUBJECT: Cell(f"arpc-{transport}", transfer),
        "floor": Cell(f"floor-{transport}", transfer),
        "torch": Cell("torch-default", transfer),
    }
    if transport == "tcp":
        cells["torch-tcp"] = Cell("torch-tcp", transfer)
    return Row(
        key=key,
        section=_BULK_SECTION,
        title=f"{title}, {transport}",
        metric="gib_per_s",
        unit="GiB/s",
        better="higher",
        cells=cells,
        in_quick=key in QUICK_BULK,
    )


def _rref_rows() -> Iterator[Row]:
    section = "Remote references"
    pair = workload("rref_latency")
    for placement in _pinned():
        yield Row(
            key=f"rref/latency/{placement}",
            section=section,
            title=f"remote() and to_here(), p50, {placement}",
            metric="p50_us",
            unit="us",
            better="lower",
            cells={SUBJECT: Cell("arpc-unix", pair, placement), "torch": Cell("torch", pair)},
        )
    for metric, unit, title in (
        ("p50_us", "us", "p50"),
        ("round_trips", "x", "in multiples of one small call"),
        ("of_calls", "x", "in multiples of eleven small calls made at once"),
    ):
        yield Row(
            key=f"rref/chain/{metric}",
            section=section,
            title=f"chain of ten remote(), {title}, same",
            metric=metric,
            unit=unit,
            better="lower",
            cells={SUBJECT: Cell("arpc-unix", workload("rref_chain", length=10), "same")},
        )
    fetch = workload("rref_fetch", size_bytes=256 * MB)
    send = workload("bulk", function="drop", size_bytes=256 * MB)
    yield Row(
        key="rref/fetch/256MB",
        section=section,
        title="fetch 256 MB; floor: a plain send of arpc",
        metric="gib_per_s",
        unit="GiB/s",
        better="higher",
        cells={
            SUBJECT: Cell("arpc-unix", fetch),
            "floor": Cell("arpc-unix", send),
            "torch": Cell("torch-default", fetch),
        },
    )
    churn = replace(workload("rref_churn", rrefs=100_000, callee_pid=0), fresh=True)
    for metric, unit, title, better in (
        ("rrefs_per_s", "/s", "made, forked and dropped per second", "higher"),
        ("caller_growth_mb", "MB", "caller's memory afterwards", "lower"),
        ("callee_growth_mb", "MB", "owner's memory afterwards", "lower"),
    ):
        yield Row(
            key=f"rref/churn/{metric}",
            section=section,
            title=f"100,000 RRefs: {title}",
            metric=metric,
            unit=unit,
            better="lower" if better == "lower" else "higher",
            cells={SUBJECT: Cell("arpc-unix", churn)},
            max_rounds=3,
            in_quick=False,
        )


def _limit_rows() -> Iterator[Row]:
    # The pair fills in the pid of its callee when it is asked.
    flood = replace(workload("flood", calls=100_000, callee_pid=0), fresh=True)
    soak = replace(workload("soak", calls=1_000_000, in_flight=256, callee_pid=0), fresh=True)
    for name, work, title, metrics in (("flood", flood, "100,000 at once", _FLOOD), ("soak", soak, "1,000,000", _SOAK)):
        for metric, unit, what, better in metrics:
            systems = {SUBJECT: "arpc-unix", "floor": "floor-unix", "torch": "torch"}
            if metric == "stall_ms":
                del systems["torch"]  # it has no loop
            yield Row(
                key=f"{name}/{metric}",
                section="Many calls",
                title=f"{title}: {what}",
                metric=metric,
                unit=unit,
                better="lower" if better == "lower" else "higher",
                cells={column: Cell(system, work) for column, system in systems.items()},
                max_rounds=3 if name == "flood" else 1,
                in_quick=False,
                long=name == "soak",
            )


_FLOOD: Final = (
    ("calls_per_s", "/s", "calls/s", "higher"),
    ("issue_s", "s", "starting them all", "lower"),
    ("stall_ms", "ms", "longest loop stall of the caller after that", "lower"),
    ("caller_bytes_per_call", "B", "caller's peak memory per call", "lower"),
    ("callee_growth_mb", "MB", "callee's peak memory growth", "lower"),
)
_SOAK: Final = (
    ("calls_per_s", "/s", "calls/s, 256 in flight", "higher"),
    ("caller_growth_mb", "MB", "caller's memory afterwards", "lower"),
    ("callee_growth_mb", "MB", "callee's memory afterwards", "lower"),
)


def _by_flavour(measure: str, **settings: Setting) -> dict[Flavour, Workload]:
    return {flavour: workload(measure, flavour=flavour, **settings) for flavour in _flavours()}


def _flavours() -> tuple[Flavour, ...]:
    return ("async", "def")


def _transports() -> tuple[Transport, ...]:
    return ("unix", "tcp")


def _pinned() -> tuple[Placement, ...]:
    return ("same", "split")


ROWS: Final[tuple[Row, ...]] = (
    *_latency_rows(),
    *_rate_rows(),
    *_tensor_rows(),
    *_bulk_rows(),
    *_rref_rows(),
    *_limit_rows(),
)
