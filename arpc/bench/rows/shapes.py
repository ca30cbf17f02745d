"""Every shape of `arpc.bench.shapes` against torch, in processes that were started apart: worst ratio first."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final, NamedTuple

from arpc.bench.functions import Flavour
from arpc.bench.placement import Placement
from arpc.bench.row import FLOOR, PINNED, SUBJECT, Cell, LatencyRow, RateRow, Row, spoken, workload
from arpc.bench.shapes import FAMILIES, GROWTH, SPREAD, Family, Shape

__all__ = ["SECTION", "floors", "goals", "growth", "rows", "spread"]

SECTION: Final = "Shapes of calls, processes started apart, worst first"
IN_FLIGHT: Final = 64
RATE_ROUNDS: Final = 3


class _Systems(NamedTuple):
    """The systems for shapes with one number of workers, in a session of their own."""

    arpc: str
    torch: str
    session: str


_SYSTEMS: Final = {
    1: _Systems("arpc-apart", "torch-apart", "shapes"),
    3: _Systems("arpc-three", "torch-three", "three workers"),
}


def rows() -> Iterator[Row]:
    """Yield the latency and the rate with 64 in flight of each shape; then comparisons with arpc itself."""
    for row, _ in goals():
        yield row
    yield from spread()
    for row, _ in growth():
        yield row


def goals() -> Iterator[tuple[Row, float]]:
    """Yield each row with the speed-up over torch that it must reach."""
    for family, shape, flavour, placement in _each():
        yield _latency_row(family, shape, flavour, placement), getattr(family, placement)
        yield _rate_row(family, shape, flavour, placement), family.at_once


def floors() -> Iterator[tuple[Row, float]]:
    """Yield each row that is compared with the floor of its payload, with the multiple of it that it may take."""
    for family, shape, flavour, placement in _each():
        if family.of_floor is not None and shape.has_floor:
            yield _latency_row(family, shape, flavour, placement), family.of_floor


def spread() -> Iterator[Row]:
    """Yield calls with one small argument, each with the call without arguments in place of the floor."""
    for shape in SPREAD:
        for placement in PINNED:
            ours, bare = (
                Cell("arpc-apart", workload("shape", name=f"call/{name}", flavour="async"), placement, "shapes")
                for name in (shape, "no arguments")
            )
            yield LatencyRow(
                f"spread/{_slug(shape)}/{placement}",
                "The spread: one small argument; floor: arpc without arguments",
                f"{shape}, async def, {placement}",
                cells={SUBJECT: ours, FLOOR: bare},
                in_quick=False,
            )


def growth() -> Iterator[tuple[Row, float]]:
    """Yield the time that each further tensor or call adds, with its limit, between forked processes on one CPU."""
    for one in GROWTH:
        work = workload("growth", few=one.few, many=one.many, more=one.more)
        row = Row(
            f"growth/{_slug(one.name)}/same",
            "Growth, forked processes",
            f"{one.name}, same",
            "each_us",
            "us",
            "lower",
            {SUBJECT: Cell("arpc-unix", work, "same")},
            in_quick=False,
        )
        yield row, one.at_most_us


def _each() -> Iterator[tuple[Family, Shape, Flavour, Placement]]:
    for family in FAMILIES:
        for shape in family.shapes:
            for flavour in shape.flavours:
                for placement in PINNED:
                    yield family, shape, flavour, placement


def _latency_row(family: Family, shape: Shape, flavour: Flavour, placement: Placement) -> Row:
    name = f"{family.name}/{shape.name}"
    make = partial(workload, "shape", name=name)
    systems = _SYSTEMS[shape.workers]
    cells = {
        SUBJECT: Cell(systems.arpc, make(flavour=flavour), placement, systems.session),
        "torch": Cell(systems.torch, make(flavour="def"), session=systems.session),
    }
    if family.of_floor is not None and shape.has_floor:
        cells[FLOOR] = Cell("floor-apart", make(flavour="def"), placement, systems.session)
    return LatencyRow(
        f"shape/{_slug(name)}/{flavour}/{placement}",
        SECTION,
        f"{family.name}: {shape.name}, {spoken(flavour)}, {placement}",
        cells=cells,
        in_quick=family.name == "call" and (flavour, placement) == ("async", "same"),
    )


def _rate_row(family: Family, shape: Shape, flavour: Flavour, placement: Placement) -> Row:
    name = f"{family.name}/{shape.name}"
    make = partial(workload, "shape_rate", name=name, in_flight=IN_FLIGHT)
    systems = _SYSTEMS[shape.workers]
    return RateRow(
        f"shape/{_slug(name)}/{flavour}/{placement}/{IN_FLIGHT}",
        SECTION,
        f"{family.name}: {shape.name}, {spoken(flavour)}, {placement}, {IN_FLIGHT} in flight",
        cells={
            SUBJECT: Cell(systems.arpc, make(flavour=flavour), placement, systems.session),
            "torch": Cell(systems.torch, make(flavour="def"), session=systems.session),
        },
        max_rounds=RATE_ROUNDS,
        in_quick=False,
    )


def _slug(name: str) -> str:
    """Return a name that can be given on a command line, where commas separate patterns."""
    return name.replace(",", "").replace("()", "").replace(" ", "-")
