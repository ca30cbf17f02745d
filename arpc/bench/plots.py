"""Draws the documents of `arpc.bench.report.as_document`. Needs matplotlib, the extra ``bench``.

The background is white and opaque, so that the pictures read the same on a light page and on a dark one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from arpc.bench.asyncio_caller import GIB
from arpc.bench.report import Document
from arpc.bench.row import FLOOR, MB, SUBJECT

__all__ = ["BARS", "CURVES", "Bar", "Curve", "draw", "series_of"]

INK: Final = "#24292f"
FAINT: Final = "#d0d7de"
COLOURS: Final = {SUBJECT: "#d9480f", "torch": "#5c6bc0", FLOOR: "#8a949e"}
OTHERS: Final = "#a5b4cb"
NAMES: Final = {
    SUBJECT: "arpc",
    "torch": "torch.distributed.rpc",
    FLOOR: "bare uvloop + pickle",
    "grpc": "grpc.aio",
    "rpyc": "RPyC",
    "ray": "Ray",
    "monarch": "Monarch",
    "dask": "Dask",
}
DPI: Final = 160


@dataclass(frozen=True, slots=True)
class Bar:
    """A panel of bars: one row, with every system that it has."""

    row: str
    title: str
    label: Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Curve:
    """A panel of lines: the rows whose `Point` is on it."""

    name: str
    title: str
    x_label: str
    y_label: str
    x_ticks: Callable[[float], str]
    as_rate: bool = False
    """Draw MB/s, from rows with GiB/s or with the time for x bytes."""


def _short(value: float) -> str:
    """Format with up to three digits and a letter for the thousands."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _bytes(value: float) -> str:
    return f"{_short(value)}B" if value < 1000 else f"{_short(value)}B".replace("k", "K")


BARS: Final = (
    Bar("peers/call", "Small call, median latency (less is better)", lambda value: f"{value:,.0f} µs"),
    Bar("peers/rate", "Calls per second, 64 in flight", lambda value: f"{value:,.0f}"),
    Bar("peers/send", "64 MB tensor, sent", lambda value: f"{value:.2f} GiB/s"),
)
CURVES: Final = (
    Curve("in flight", "Calls in flight", "in flight", "calls per second", _short),
    Curve("workers", "Workers called in turn", "workers in the group", "µs per call", _short),
    Curve("payload", "Size of the tensor", "bytes sent", "MB/s", _bytes, as_rate=True),
    Curve("tensors", "Tensors in one call, echoed", "tensors of 16 floats", "µs per call", _short),
)


def draw(documents: Sequence[Document], directory: Path) -> Iterator[Path]:
    """Write the pictures for which there are figures; if several documents have a row, the last one counts."""
    rows = {row["key"]: row for document in documents for row in document["rows"]}
    footer = _footer(documents[-1])
    directory.mkdir(parents=True, exist_ok=True)
    panels = [bar for bar in BARS if bar.row in rows]
    if panels:
        yield _save(_draw_bars(panels, rows, footer), directory / "bench-systems.png")
    curves = [(curve, series) for curve in CURVES if (series := series_of(curve, rows.values()))]
    if curves:
        yield _save(_draw_curves(curves, footer), directory / "bench-growth.png")


def series_of(curve: Curve, rows: Any) -> dict[str, list[tuple[float, float]]]:
    """Return the points of each column, from left to right; columns with fewer than two points are left out."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["point"] is None or row["point"]["curve"] != curve.name:
            continue
        x = row["point"]["x"]
        for column, figures in row["columns"].items():
            y = figures["median"]
            if curve.as_rate:
                y = x / y if row["unit"] == "us" else y * GIB / MB  # a byte in a microsecond is a megabyte in a second
            points.setdefault(column, []).append((x, y))
    return {column: sorted(those) for column, those in points.items() if len(those) > 1}


def _draw_bars(panels: list[Bar], rows: dict[str, Any], footer: str) -> Figure:
    most = max(len(rows[bar.row]["columns"]) for bar in panels)
    figure = _figure(width=4.6 * len(panels), height=1.5 + 0.42 * most)
    for number, bar in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), number + 1)
        row = rows[bar.row]
        best_first = sorted(
            ((figures["median"], column) for column, figures in row["columns"].items()),
            reverse=row["better"] == "higher",
        )
        for place, (value, column) in enumerate(best_first):
            ours = column == SUBJECT
            axes.barh(place, value, height=0.66, color=COLOURS.get(column, OTHERS))
            axes.text(
                value,
                place,
                f" {bar.label(value)}",
                va="center",
                color=INK,
                weight="bold" if ours else "normal",
                size=9,
            )
        axes.set_yticks(range(len(best_first)), [NAMES.get(column, column) for _, column in best_first], size=9)
        axes.set_xlim(0, max(value for value, _ in best_first) * 1.32)
        axes.invert_yaxis()
        axes.set_xticks([])
        axes.tick_params(length=0, colors=INK)
        axes.set_title(bar.title, size=10.5, color=INK, weight="bold", loc="left")
        for side in ("top", "right", "bottom"):
            axes.spines[side].set_visible(False)
        axes.spines["left"].set_color(FAINT)
    _sign(figure, footer)
    return figure


def _draw_curves(curves: list[tuple[Curve, dict[str, list[tuple[float, float]]]]], footer: str) -> Figure:
    columns = min(2, len(curves))
    lines = -(-len(curves) // columns)
    figure = _figure(width=5.4 * columns, height=0.7 + 3.1 * lines)
    for number, (curve, series) in enumerate(curves):
        axes = figure.add_subplot(lines, columns, number + 1)
        for column in sorted(series, key=lambda name: name == SUBJECT):  # ours last, so that it lies on top
            xs, ys = zip(*series[column], strict=True)
            ours = column == SUBJECT
            axes.plot(
                xs,
                ys,
                marker="o",
                markersize=4.5 if ours else 3.5,
                linewidth=2.4 if ours else 1.6,
                color=COLOURS.get(column, OTHERS),
                label=NAMES.get(column, column),
            )
        _set_scales(axes, curve, series)
        if number == 0:
            handles, labels = axes.get_legend_handles_labels()
            axes.legend(handles[::-1], labels[::-1], frameon=False, fontsize=8.5, labelcolor=INK)
    _sign(figure, footer)
    return figure


def _set_scales(axes: Axes, curve: Curve, series: dict[str, list[tuple[float, float]]]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    lowest = min(y for points in series.values() for _, y in points)
    highest = max(y for points in series.values() for _, y in points)
    axes.set_ylim(lowest / 1.8, highest * 1.8)
    xs = sorted({x for points in series.values() for x, _ in points})
    shown = xs if len(xs) <= 7 else xs[::-2]
    axes.set_xticks(shown, [curve.x_ticks(x) for x in shown])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.set_title(curve.title, size=10.5, color=INK, weight="bold", loc="left")
    axes.set_xlabel(curve.x_label, size=9, color=INK)
    axes.set_ylabel(curve.y_label, size=9, color=INK)
    axes.tick_params(colors=INK, labelsize=8.5, length=0, which="both")
    axes.grid(visible=True, color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _sign(figure: Figure, footer: str) -> None:
    figure.supxlabel(footer, size=8, color="#57606a", x=0.01, ha="left")


def _footer(document: Document) -> str:
    machine = document["machine"]
    versions = ", ".join(
        f"{name} {version}" for name, version in machine["versions"].items() if name in {"arpc", "torch"}
    )
    return (
        f"Two processes on {machine['cpus']} CPUs ({machine['cpu']}), Python {machine['python']}, {versions};"
        f" medians of {document['rounds']} interleaved rounds"
    )


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, metadata={"Software": None})
    return path
