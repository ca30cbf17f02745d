"""Reports the results: tables with the rules of the run, a table of targets, and JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from arpc.bench.machine import describe_machine
from arpc.bench.placement import can_split, cpus_of
from arpc.bench.rounds import ATTEMPTS, FOREIGN_LIMIT, UNDISTURBED_ROUNDS, Results, Schedule
from arpc.bench.row import FLOOR, SUBJECT, Row
from arpc.bench.rows import peers, shapes
from arpc.bench.systems import PEERS, REGISTRY, TORCH_THREADS, WARM_UP_SHARE
from arpc.bench.targets import Verdict

__all__ = ["Document", "as_document", "print_results", "print_rules", "print_targets", "print_warnings"]

Document = dict[str, Any]
"""The result of `as_document`."""

MISSING = "-"
MINIMUM_WIDTH = 150
DISTURBED_LIMIT = 0.25


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    header: tuple[str, ...]
    lines: list[tuple[str, ...]]


def print_results(results: Results) -> None:
    """Print one table per section; a row without any figure is left out."""
    for section in dict.fromkeys(row.section for row in results.rows):
        rows = [row for row in results.rows if row.section == section and _measured(results, row)]
        if rows:
            if section == shapes.SECTION:
                rows = _worst_first(results, rows)
            make = _side_by_side_table if section == peers.SECTION else _section_table
            _print_table(make(results, section, rows))


def print_targets(verdicts: Iterable[Verdict]) -> None:
    """Print every target with its bar, the measured figure and the verdict: missed ones first, the worst on top."""
    ordered = sorted(verdicts, key=lambda verdict: verdict.reached if verdict.outcome == "miss" else math.inf)
    lines: list[tuple[str, ...]] = [
        (
            verdict.target.what,
            verdict.target.bar,
            MISSING if verdict.measured is None else f"{verdict.measured:,.2f}",
            verdict.outcome,
            "disturbed" if verdict.disturbed else "",
        )
        for verdict in ordered
    ]
    _print_table(Table("Targets, missed ones first", ("target", "bar", "measured", "", ""), lines))
    counts = Counter(verdict.outcome for verdict in ordered)
    print("Targets: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))


def print_warnings(results: Results, absent: dict[str, str]) -> None:
    """Print what is missing in the tables, and why; and whether the run can be trusted."""
    disturbed, measured = results.disturbed()
    if disturbed > measured * DISTURBED_LIMIT:
        print(f"DISTURBED: other programs were busy in {disturbed} of {measured} measurements. Do not quote this run.")
    for system, reason in absent.items():
        print(f"not measured: {system}: {reason}")
    for system, texts in results.failures.items():
        word = "not measured" if system in PEERS else "failed"
        print(f"{word}: {system}: {texts[0]}" + (f"\n  ({len(texts)} times)" if len(texts) > 1 else ""))


def rules(results: Results, schedule: Schedule) -> list[str]:
    """Return the rules of this run, which make its ratios meaningful."""
    (caller,), (callee,) = cpus_of("split") if can_split() else cpus_of("same")
    pinned = f"`same` is both on CPU {caller}, `split` the caller on CPU {caller} and the callee on CPU {callee}"
    if not can_split():
        pinned = f"`same` is both on CPU {caller}; there is no second CPU, so there are no `split` rows"
    disturbed, measured = results.disturbed()
    return [
        f"Placement: two processes a system; {pinned}. Bulk rows, and torch always, run unpinned.",
        (
            "Start: the processes of every system are forked from one that has imported torch, as `arpc launch` does,"
            " so that both sides have the same layout of addresses, which matters on one CPU."
            + " Only {} start their own.".format(", ".join(name for name, one in REGISTRY.items() if not one.forks))
        ),
        (
            f"Opponent: calls against torch with {TORCH_THREADS} worker threads and a sliding window of futures, no"
            " barrier; bulk against torch as it comes; TCP rows also against torch forced to TCP."
        ),
        "Interference: an idle torch process spins on a CPU, so it is stopped while another system is measured.",
        (
            f"Rounds: {schedule.rounds}. In each, the systems of a row follow each other, in an order that turns. A"
            " ratio is the median of the rounds' ratios; behind it, how far the middle half of them lies from it."
        ),
        (
            f"Warm: {schedule.budget_s:g} s a cell after {schedule.budget_s * WARM_UP_SHARE:g} s of warm-up; bulk sends"
            " one tensor again and again, the first two times (at 256 MB the first) do not count. Cold: the receiver"
            " keeps all it gets, so that each lands in fresh memory."
        ),
        "Bulk: one transfer at a time; 1 MB is 10^6 bytes; the bytes of an echo count once.",
        "Many calls: processes that have done nothing else; at most 3 rounds, as for all that takes long.",
        (
            "Garbage collector: as each system leaves it, but for what was imported before the fork, which is frozen;"
            " arpc and the floor freeze what is there at the start."
        ),
        f"Floor: {REGISTRY['floor-unix'].about}, or TCP; functions run in the read callback; numpy arrays for tensors.",
        "`x floor`: arpc's figure divided by the floor's. `x` an opponent: how many times as fast (or small) arpc is.",
        (
            f"Disturbance: a measurement is repeated, up to {ATTEMPTS} times, if other programs take more than"
            f" {FOREIGN_LIMIT:.0%} of the machine. Rounds disturbed all the same do not count where"
            f" {UNDISTURBED_ROUNDS} others are left. Here: {disturbed} of {measured} measurements."
        ),
        results.steadiness.describe(),
    ]


def print_rules(results: Results, schedule: Schedule) -> None:
    """Print the rules, as they were followed in this run."""
    print("How it was measured")
    for rule in rules(results, schedule):
        print(f"  - {rule}")


def as_document(results: Results, schedule: Schedule, verdicts: Iterable[Verdict], absent: dict[str, str]) -> Document:
    """Return all results, with the figure of every round, for JSON."""
    return {
        "machine": describe_machine(),
        "steadiness": {"spread": results.steadiness.spread, "stolen_share": results.steadiness.stolen_share},
        "rounds": schedule.rounds,
        "budget_s": schedule.budget_s,
        "rules": rules(results, schedule),
        "systems": {name: configuration.about for name, configuration in REGISTRY.items() if name not in absent},
        "absent": absent,
        "failures": results.failures,
        "rows": [_row_as_json(results, row) for row in results.rows if _measured(results, row)],
        "targets": [
            {
                "what": verdict.target.what,
                "row": verdict.target.row,
                "against": verdict.target.against,
                "bar": verdict.target.bar,
                "measured": verdict.measured,
                "outcome": verdict.outcome,
                "disturbed": verdict.disturbed,
            }
            for verdict in verdicts
        ],
    }


def _row_as_json(results: Results, row: Row) -> dict[str, Any]:
    ratios = {}
    for column in row.cells:
        if column != SUBJECT and (comparison := results.comparison(row, column)) is not None:
            ratios[column] = {
                "quotient": comparison.quotient,
                "speedup": comparison.speedup,
                "quotient_rounds": comparison.quotients,
                "disturbed": comparison.disturbed,
            }
    return {
        "key": row.key,
        "section": row.section,
        "title": row.title,
        "unit": row.unit,
        "better": row.better,
        "point": None if row.point is None else {"curve": row.point.curve, "x": row.point.x},
        "columns": {
            column: {
                "system": cell.system,
                "placement": cell.placement,
                "median": results.median(row, column),
                "rounds": results.values(row, column),
                "foreign_shares": results.foreign_shares(row, column),
            }
            for column, cell in row.cells.items()
            if results.median(row, column) is not None
        },
        "ratios": ratios,
    }


def _section_table(results: Results, section: str, rows: Sequence[Row]) -> Table:
    columns = [
        column
        for column in dict.fromkeys(column for row in rows for column in row.cells)
        if any(results.median(row, column) is not None for row in rows)
    ]
    others = [column for column in columns if column != SUBJECT] if SUBJECT in columns else []
    lines = []
    for row in rows:
        line = [row.title]
        line += [_figure(results.median(row, column), row.unit) for column in columns]
        for column in others:
            comparison = results.comparison(row, column)
            if comparison is None:
                line.append(MISSING)
            else:
                ratio = comparison.quotient if column == FLOOR else comparison.speedup
                line.append(f"{ratio:.2f}x ±{comparison.spread:.0%}")
        lines.append(tuple(line))
    return Table(section, ("", *columns, *(f"x {column}" for column in others)), lines)


def _worst_first(results: Results, rows: Sequence[Row]) -> list[Row]:
    """Return the rows sorted by arpc's speed-up over torch, smallest first."""

    def speedup(row: Row) -> float:
        comparison = results.comparison(row, "torch")
        return math.inf if comparison is None else comparison.speedup

    return sorted(rows, key=speedup)


def _side_by_side_table(results: Results, section: str, rows: Sequence[Row]) -> Table:
    """Make a table with a line per system instead of per row: there are many systems, and few rows."""
    header = [""]
    for row in rows:
        header += [row.title, "arpc is"]
    lines = []
    for column in dict.fromkeys(column for row in rows for column in row.cells):
        line = [column]
        for row in rows:
            comparison = results.comparison(row, column) if column != SUBJECT else None
            line.append(_figure(results.median(row, column), row.unit))
            line.append("" if comparison is None else f"{comparison.speedup:.1f}x ±{comparison.spread:.0%}")
        if any(results.median(row, column) is not None for row in rows):
            lines.append(tuple(line))
    return Table(section, tuple(header), lines)


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return MISSING
    if unit in {"/s", "B"}:
        return f"{value:,.0f} {unit}"
    return f"{value:,.2f} {unit}" if abs(value) < 10 else f"{value:,.1f} {unit}"


def _measured(results: Results, row: Row) -> bool:
    return any(results.median(row, column) is not None for column in row.cells)


def _print_table(table: Table) -> None:
    try:
        from rich.console import Console  # optional: without it the table is plain
        from rich.table import Table as RichTable
    except ImportError:
        _print_plain(table)
        return
    rich_table = RichTable(title=table.title, title_justify="left", header_style="bold")
    for number, name in enumerate(table.header):
        rich_table.add_column(name, justify="left" if number == 0 else "right", no_wrap=True)
    for line in table.lines:
        rich_table.add_row(*(_coloured(part) for part in line))
    # A figure that is cut off is worse than a line that wraps, and a file has no width limit.
    Console(width=max(Console().width, MINIMUM_WIDTH)).print(rich_table)


def _coloured(text: str) -> str:
    return {"pass": "[green]pass[/]", "miss": "[red]miss[/]"}.get(text, text)


def _print_plain(table: Table) -> None:
    widths = [max(len(line[i]) for line in [table.header, *table.lines]) for i in range(len(table.header))]
    print(f"\n{table.title}")
    for line in [table.header, *table.lines]:
        cells = [
            part.ljust(width) if i == 0 else part.rjust(width)
            for i, (part, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
