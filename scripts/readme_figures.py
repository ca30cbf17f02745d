"""Writes the picture and the table of the README from one run of the benchmark, so that the two always agree.

``make figures`` measures, and then calls ``python -m scripts.readme_figures build/figures.json``. The figures of the
README are kept in docs/figures.json, from which ``python -m scripts.readme_figures`` alone draws and writes them again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
import subprocess
import textwrap
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from arpc.bench.plots import NAMES
from arpc.bench.report import DISTURBED_LIMIT
from arpc.bench.rounds import FOREIGN_LIMIT

ROOT: Final = Path(__file__).resolve().parent.parent
README: Final = ROOT / "README.md"
KEPT: Final = ROOT / "docs" / "figures.json"
PICTURE: Final = ROOT / "docs" / "images" / "ratios.png"
BEGIN: Final = "<!-- figures: written by `make figures`, do not edit -->"
END: Final = "<!-- end of figures -->"

SHOWN: Final = {
    "shape/call/no-arguments/async/split": "no arguments, `async def`",
    "shape/call/no-arguments/def/split": "no arguments, plain `def` (runs in a thread)",
    "shape/call/keyword-arguments/async/split": "keyword arguments",
    "shape/call/16-float-tensor/async/split": "16 floats there and back",
    "shape/containers/list-of-10-tensors/async/split": "list of 10 small tensors there and back",
    "shape/containers/dict-of-50-tensors-of-4-KB/async/split": "dict of 50 tensors of 4 KB there and back",
    "shape/rref/method/def/split": "method of a remote object",
    "shape/rref/tensor-remote-and-to_here/def/split": "`remote()` and `to_here()` of a tensor",
    "shape/autograd/1-in-a-row/async/split": "forward and backward through one remote call",
    "shape/autograd/3-in-a-row/async/split": "forward and backward through three calls in a row",
    "shape/call/no-arguments/async/split/64": "64 calls in flight, no arguments",
    "shape/call/16-float-tensor/async/split/64": "64 calls in flight, 16 floats there and back",
    "peers/send": "a 64 MB tensor, sent",
}
"""The rows of the table, and their labels there."""

PEER_PANELS: Final = (
    ("peers/call", "One small call"),
    ("peers/rate", "64 calls in flight"),
    ("peers/send", "Send 64 MB"),
)
FAMILIES: Final = (
    ("shape/call/", False, "plain calls"),
    ("shape/call/", True, "plain calls,\n64 in flight"),
    ("shape/containers/", False, "lists and dicts\nof tensors"),
    ("shape/rref/", False, "remote objects"),
    ("shape/autograd/", False, "distributed\nautograd"),
)
"""Prefix of the keys, whether the row is a rate, and the label in the picture."""

TICKS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500)
INK: Final = "#24292f"
FAINT: Final = "#d0d7de"
ACCENT: Final = "#d9480f"


def condense(document: dict[str, Any], commit: str) -> dict[str, Any]:
    """Return the part of an ``arpc bench --json`` document that the README needs: medians, ratios, conditions."""
    shares = [
        share for row in document["rows"] for figures in row["columns"].values() for share in figures["foreign_shares"]
    ]
    rows = {
        row["key"]: {
            "title": row["title"],
            "unit": row["unit"],
            "medians": {column: _rounded(figures["median"]) for column, figures in row["columns"].items()},
            "ratios": {
                column: _rounded(ratio["speedup"]) for column, ratio in row["ratios"].items() if column != "floor"
            },
        }
        for row in document["rows"]
        if row["key"].startswith(("shape/", "peers/"))
    }
    return {
        "commit": commit,
        "machine": {name: document["machine"][name] for name in ("cpu", "cpus", "python", "versions")},
        "rounds": document["rounds"],
        "disturbed": sum(share > FOREIGN_LIMIT for share in shares),
        "measured": len(shares),
        "rows": rows,
    }


def table(kept: dict[str, Any]) -> str:
    """Return the Markdown between the two markers of the README."""
    rows = kept["rows"]
    lines = [
        "| two processes on one host, one CPU each | arpc | torch.distributed.rpc | speed-up |",
        "| --- | --- | --- | --- |",
    ]
    for key, label in SHOWN.items():
        if (row := rows.get(key)) is not None and "torch" in row["ratios"]:
            ours, theirs = (spoken(row["medians"][column], row["unit"]) for column in ("arpc", "torch"))
            lines.append(f"| {label} | {ours} | {theirs} | {times(row['ratios']['torch'])} |")
    ratios = shape_ratios(kept)
    worst = min(ratios, key=ratios.__getitem__)
    machine = kept["machine"]
    lines += [
        "",
        (
            f"The bench measures {len(ratios)} kinds of calls. arpc is {ratios[worst]:.1f} to"
            f" {max(ratios.values()):.0f} times as fast as torch, and {statistics.median(ratios.values()):.0f} times"
            f" in the median. It is slowest, compared with torch, at *{without_placement(rows[worst]['title'])}*."
        ),
        "",
        (
            f"Measured by `make figures` at commit {kept['commit']}, {kept['rounds']} rounds, on {machine['cpus']} CPUs"
            f" ({machine['cpu']}), Python {machine['python']}, torch {machine['versions']['torch']}. torch runs with"
            " three worker threads, its fastest setting, and may use both CPUs."
        ),
    ]
    if is_disturbed(kept):
        lines += [
            "",
            (
                f"**Do not quote these figures:** other programs were busy during {kept['disturbed']} of"
                f" {kept['measured']} measurements. That slows torch down more than arpc, so the ratios are larger"
                " than on a quiet machine."
            ),
        ]
    return "\n".join(lines)


def is_disturbed(kept: dict[str, Any]) -> bool:
    """Whether other programs were busy too often for the figures to be quoted."""
    return bool(kept["disturbed"] > kept["measured"] * DISTURBED_LIMIT)


def shape_ratios(kept: dict[str, Any]) -> dict[str, float]:
    """Return how many times as fast as torch arpc is, for every shape on two CPUs."""
    return {
        key: row["ratios"]["torch"]
        for key, row in kept["rows"].items()
        if key.startswith("shape/") and "torch" in row["ratios"]
    }


def without_placement(title: str) -> str:
    """Return a row's title without the word for "one CPU each", which the README states once for all rows."""
    return title.replace(", split", "")


def times(ratio: float) -> str:
    """Format a ratio with no more digits than are significant."""
    return f"{ratio:.1f}x" if ratio < 10 else f"{ratio:.0f}x"


def spoken(value: float, unit: str) -> str:
    """Format a figure as a person would write it."""
    match unit:
        case "us" if value >= 1000:
            return f"{value / 1000:.1f} ms"
        case "us":
            return f"{value:.0f} µs"
        case "/s":
            return f"{round(value, -3):,.0f}/s"
        case _:
            return f"{value:.1f} {unit}"


def with_table(readme: str, kept: dict[str, Any]) -> str:
    """Return the README with the table of these figures between its markers."""
    begin, end = readme.index(BEGIN) + len(BEGIN), readme.index(END)
    return f"{readme[:begin]}\n{table(kept)}\n{readme[end:]}"


def fingerprint(kept: dict[str, Any]) -> str:
    """Return a hash of the figures, which the picture has in its metadata: it identifies the drawn figures."""
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def draw(kept: dict[str, Any], path: Path) -> None:
    """Draw ratios only: every shape against torch on the left, the other systems on the right."""
    figure = Figure(figsize=(13, 4.6), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    peers = [(kept["rows"][key], title) for key, title in PEER_PANELS if key in kept["rows"]]
    ratios = (2.4, *(1 for _ in peers))
    grid = figure.add_gridspec(1, 1 + len(peers), width_ratios=ratios)
    _draw_shapes(figure.add_subplot(grid[0]), kept)
    for number, (row, title) in enumerate(peers, 1):
        _draw_peers(figure.add_subplot(grid[number]), row, title)
    machine = kept["machine"]
    figure.supxlabel(
        f"How many times as fast as each other system arpc is; 1x is equal. Two processes, {machine['cpus']} CPUs"
        f" ({machine['cpu']}), medians of {kept['rounds']} rounds, commit {kept['commit']}"
        + (". Other programs were busy: do not quote." if is_disturbed(kept) else ""),
        size=8,
        color="#57606a",
        x=0.01,
        ha="left",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None, "Source": fingerprint(kept)})


def _draw_shapes(axes: Axes, kept: dict[str, Any]) -> None:
    ratios = shape_ratios(kept)
    worst = min(ratios, key=ratios.__getitem__)
    for place, (prefix, is_rate, _) in enumerate(FAMILIES):
        ours = {
            key: ratio for key, ratio in ratios.items() if key.startswith(prefix) and key.endswith("/64") == is_rate
        }
        if not ours:
            continue
        offsets = [
            ((number * 7) % 11 - 5) * 0.045 for number in range(len(ours))
        ]  # so that equal ones can be told apart
        axes.scatter(list(ours.values()), [place + offset for offset in offsets], s=16, color=ACCENT, alpha=0.55, lw=0)
        middle = statistics.median(ours.values())
        axes.plot([middle, middle], [place - 0.36, place + 0.36], color=INK, lw=1.6)
        axes.text(middle, place - 0.4, times(middle), ha="center", va="bottom", size=8.5, color=INK, weight="bold")
        if worst in ours:
            axes.annotate(
                textwrap.fill(f"worst, {ratios[worst]:.1f}x: {without_placement(kept['rows'][worst]['title'])}", 20),
                (ratios[worst], place + offsets[list(ours).index(worst)]),
                xytext=(1.06, place),  # nothing else is to the left of the worst
                textcoords="data",
                arrowprops={"arrowstyle": "-", "color": "#57606a", "lw": 0.8},
                size=8,
                color="#57606a",
                va="center",
            )
    axes.axvline(1, color=INK, lw=1, linestyle=":")
    axes.set_yticks(range(len(FAMILIES)), [label for _, _, label in FAMILIES], size=9)
    axes.set_ylim(len(FAMILIES) - 0.05, -0.75)
    axes.set_xscale("log")
    axes.set_xlim(min(0.8, min(ratios.values()) / 1.3), max(ratios.values()) * 1.2)
    ticks = [tick for tick in TICKS if tick <= max(ratios.values())]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_title(f"{len(ratios)} kinds of calls, against torch.distributed.rpc", size=10.5, weight="bold", loc="left")
    axes.grid(visible=True, axis="x", color=FAINT, lw=0.6)
    _strip(axes)


def _draw_peers(axes: Axes, row: dict[str, Any], title: str) -> None:
    ratios = sorted(row["ratios"].items(), key=lambda one: one[1])
    for place, (column, ratio) in enumerate(ratios):
        axes.barh(place, ratio, height=0.62, color="#5c6bc0" if column == "torch" else "#a5b4cb")
        axes.text(ratio, place, f" {times(ratio)}", va="center", size=9, color=INK)
    axes.axvline(1, color=INK, lw=1, linestyle=":")
    axes.set_yticks(range(len(ratios)), [_short_name(column) for column, _ in ratios], size=9)
    axes.invert_yaxis()
    axes.set_xlim(0, max((ratio for _, ratio in ratios), default=1) * 1.3)
    axes.set_xticks([])
    axes.set_title(title, size=10.5, weight="bold", loc="left")
    _strip(axes)


def _short_name(column: str) -> str:
    return "torch rpc" if column == "torch" else NAMES.get(column, column)


def _strip(axes: Axes) -> None:
    axes.tick_params(length=0, colors=INK, labelsize=9)
    axes.set_axisbelow(True)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color(FAINT)


def _rounded(value: float) -> float:
    """Round to three digits: more would suggest a steadier machine than there is."""
    return float(f"{value:.3g}")


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short=9", "HEAD"],  # noqa: S607 - git is where the user's path has it
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def main() -> None:
    """Condense a new run if one is given, then draw the picture and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "document", type=Path, nargs="?", help="what arpc bench --json wrote; without it, the kept figures"
    )
    options = parser.parse_args()
    if options.document is not None:
        kept = condense(json.loads(options.document.read_text()), _commit())
        KEPT.write_text(re.sub(r"\n {3,}|\n  (?=\})", " ", json.dumps(kept, indent=1)) + "\n")
    kept = json.loads(KEPT.read_text())
    draw(kept, PICTURE)
    README.write_text(with_table(README.read_text(), kept))
    print(f"written: {PICTURE.relative_to(ROOT)}, and the table in {README.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
