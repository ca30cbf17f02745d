"""The type of a row: one figure of several systems, measured in the same way. The rows are in `arpc.bench.rows`.

A file of rows has a function that makes them::

    def rows() -> Iterator[Row]:
        work = workload("latency", function="noop", payload="none", flavour="async")
        yield LatencyRow(
            key="call/mine",
            section="Small calls",
            title="my call",
            cells={SUBJECT: Cell("arpc-unix", work, "same"), "torch": Cell("torch", work)},
        )
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Final, Literal

from arpc.bench.functions import Flavour
from arpc.bench.placement import Placement

__all__ = [
    "FLAVOURS",
    "FLOOR",
    "MAIN_SESSION",
    "MB",
    "PINNED",
    "SUBJECT",
    "TRANSPORTS",
    "BulkRow",
    "Cell",
    "LatencyRow",
    "Metric",
    "Point",
    "RateRow",
    "Row",
    "Transport",
    "Workload",
    "by_flavour",
    "fresh_workload",
    "spoken",
    "three",
    "workload",
]

Setting = str | int | float
Transport = Literal["unix", "tcp"]

SUBJECT: Final = "arpc"
"""The column that is compared with all the others."""

FLOOR: Final = "floor"
"""The column of a limit that can hardly be beaten: compared as a plain quotient, not by speed."""

MAIN_SESSION: Final = "main"

MB: Final = 1_000_000
FLAVOURS: Final[tuple[Flavour, ...]] = ("async", "def")
TRANSPORTS: Final[tuple[Transport, ...]] = ("unix", "tcp")
PINNED: Final[tuple[Placement, ...]] = ("same", "split")


@dataclass(frozen=True, slots=True)
class Workload:
    """A measurement: the name of a method of the callers, and its arguments."""

    measure: str
    settings: tuple[tuple[str, Setting], ...]
    fresh: bool = False
    """True if it needs processes that have done nothing yet."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One system doing one workload at one placement. Rows that share a cell share its figures."""

    system: str
    workload: Workload
    placement: Placement = "free"
    session: str = MAIN_SESSION
    """The part of the run that it belongs to. Its systems run only then; all cells of a row have the same session."""


@dataclass(frozen=True, slots=True)
class Point:
    """The position of a row on one of `arpc.bench.plots.CURVES`."""

    curve: str
    x: float


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a figure, and the cells that have it."""

    key: str
    section: str
    title: str
    metric: str
    unit: str
    better: Literal["lower", "higher"]
    cells: Mapping[str, Cell]
    """The cells by column: `SUBJECT`, `FLOOR` (compared as a plain quotient) and opponents (compared by speed)."""
    _: KW_ONLY
    max_rounds: int | None = None
    in_quick: bool = True
    long: bool = False
    """True if it is measured only on request, because it takes minutes."""
    point: Point | None = None

    @property
    def session(self) -> str:
        return next(iter(self.cells.values())).session


LatencyRow: Final = partial(Row, metric="p50_us", unit="us", better="lower")
"""A row that shows the median time of a call."""
RateRow: Final = partial(Row, metric="calls_per_s", unit="/s", better="higher")
"""A row that shows calls per second."""
BulkRow: Final = partial(Row, metric="gib_per_s", unit="GiB/s", better="higher")
"""A row that shows how fast large tensors are transferred."""

Metric = tuple[str, str, str, Literal["lower", "higher"]]
"""A figure of a measurement that has several: name, unit, description, and which direction is better."""


def workload(measure: str, **settings: Setting) -> Workload:
    """Make a workload of the method `measure` of a caller, with these settings."""
    return Workload(measure, tuple(sorted(settings.items())))


def fresh_workload(measure: str, **settings: Setting) -> Workload:
    """Make a workload in processes that have done nothing yet."""
    return replace(workload(measure, **settings), fresh=True)


def by_flavour(measure: str, **settings: Setting) -> dict[Flavour, Workload]:
    """Make a workload of an ``async def`` and one of a plain ``def``."""
    return {flavour: workload(measure, flavour=flavour, **settings) for flavour in FLAVOURS}


def three(
    make: Mapping[Flavour, Workload], flavour: Flavour, transport: Transport, placement: Placement
) -> dict[str, Cell]:
    """Make cells of arpc and the floor at `placement`, and of torch, which gains nothing from pinning, unpinned."""
    cells = {
        SUBJECT: Cell(f"arpc-{transport}", make[flavour], placement),
        FLOOR: Cell(f"floor-{transport}", make["def"], placement),
        "torch": Cell("torch", make["def"]),
    }
    if transport == "tcp":
        cells["torch-tcp"] = Cell("torch-tcp", make["def"])
    return cells


def spoken(flavour: Flavour) -> str:
    """Return a flavour as Python spells it."""
    return "async def" if flavour == "async" else "def"
