"""Every shape of `arpc.bench.shapes` against torch, in processes that were started apart: worst ratio first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from arpc.bench.functions import Flavour
from arpc.bench.placement import Placement
from arpc.bench.row import FLOOR, PINNED, SUBJECT, Cell, Row, spoken, workload
from arpc.bench.shapes import FAMILIES, SPREAD, Family, Shape

__all__ = ["SECTION", "floors", "goals", "rows", "spread"]

SECTION: Final = "Shapes of calls, processes started apart, worst first"
IN_FLIGHT: Final = 64
_SESSION: Final = "shapes"


def rows() -> Iterator[Row]:
    """Latency of each shape, and the rate of 64 in flight where that has a goal."""
    for row, _ in _rows_and_goals():
        yield row
    yield from spread()


def goals() -> Iterator[tuple[Row, float]]:
    """Each row with the speed-up over torch that it must reach."""
    yield from _rows_and_goals()


def spread() -> Iterator[Row]:
    """Calls with one small argument, each with the call that has none in place of the floor."""
    for shape in SPREAD:
        for placement in PINNED:
            ours, bare = (
                Cell("arpc-apart", workload("shape", name=f"call/{name}", flavour="async"), placement, _SESSION)
                for name in (shape, "no arguments")
            )
            yield Row(
                key=f"spread/{_slug(shape)}/{placement}",
                section="The spread: one small argument; floor: arpc without arguments",
                title=f"{shape}, async def, {placement}",
                metric="p50_us",
                unit="us",
                better="lower",
                cells={SUBJECT: ours, FLOOR: bare},
                in_quick=False,
            )


def floors() -> Iterator[tuple[Row, float]]:
    """Each row that is compared with the floor of its payload, with how many times that it may take."""
    for family in FAMILIES:
        if family.of_floor is not None:
            for shape in family.shapes:
                for flavour in shape.flavours:
                    for placement in PINNED:
                        yield _latency_row(family, shape, flavour, placement), family.of_floor


def _rows_and_goals() -> Iterator[tuple[Row, float]]:
    for family in FAMILIES:
        for shape in family.shapes:
            for flavour in shape.flavours:
                for placement in PINNED:
                    yield _latency_row(family, shape, flavour, placement), getattr(family, placement)
                    if family.at_once is not None:
                        yield _rate_row(family, shape, flavour, placement), family.at_once


def _latency_row(family: Family, shape: Shape, flavour: Flavour, placement: Placement) -> Row:
    name = f"{family.name}/{shape.name}"
    work = {flavour: workload("shape", name=name, flavour=flavour) for flavour in (flavour, "def")}
    return Row(
        key=f"shape/{_slug(name)}/{flavour}/{placement}",
        section=SECTION,
        title=f"{family.name}: {shape.name}, {spoken(flavour)}, {placement}",
        metric="p50_us",
        unit="us",
        better="lower",
        cells={
            SUBJECT: Cell("arpc-apart", work[flavour], placement, _SESSION),
            "torch": Cell("torch-apart", work["def"], session=_SESSION),
            **({FLOOR: Cell("floor-apart", work["def"], placement, _SESSION)} if family.of_floor is not None else {}),
        },
        in_quick=family.name == "call" and (flavour, placement) == ("async", "same"),
    )


def _rate_row(family: Family, shape: Shape, flavour: Flavour, placement: Placement) -> Row:
    name = f"{family.name}/{shape.name}"
    work = {
        flavour: workload("shape_rate", name=name, flavour=flavour, in_flight=IN_FLIGHT) for flavour in (flavour, "def")
    }
    return Row(
        key=f"shape/{_slug(name)}/{flavour}/{placement}/{IN_FLIGHT}",
        section=SECTION,
        title=f"{family.name}: {shape.name}, {spoken(flavour)}, {placement}, {IN_FLIGHT} in flight",
        metric="calls_per_s",
        unit="/s",
        better="higher",
        cells={
            SUBJECT: Cell("arpc-apart", work[flavour], placement, _SESSION),
            "torch": Cell("torch-apart", work["def"], session=_SESSION),
        },
        max_rounds=5,
        in_quick=False,
    )


def _slug(name: str) -> str:
    """A name that can be asked for on a command line: commas separate patterns there."""
    return name.replace(",", "").replace("()", "").replace(" ", "-")
