"""The command ``arpc bench``, also of ``make bench``: measures, reports, draws."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from arpc.bench import report
from arpc.bench.nursery import Nursery
from arpc.bench.pairs import MeasurementFailedError, Pair
from arpc.bench.rounds import Results, Schedule, measure_rounds
from arpc.bench.rows import Row, select
from arpc.bench.systems import DEFAULT_ROUNDS, PEERS, QUICK_ROUNDS, REGISTRY
from arpc.bench.targets import judge
from arpc.extras import install_command

__all__ = ["choose_systems", "measure", "run"]

BUDGET_S = 0.1
QUICK_REPEAT_S = 5.0


def run(options: argparse.Namespace) -> int:
    """Measure and report the requested rows. Return the exit status, 1 if arpc, torch or a floor failed."""
    if not sys.platform.startswith("linux") and not options.list and not options.replot:
        print("arpc bench pins processes and reads /proc: it takes Linux", file=sys.stderr)
        return 2
    if (options.replot or options.plot) and (problem := _prepare_plots(options)):
        print(problem, file=sys.stderr)
        return 2
    if options.replot:
        return _draw([json.loads(path.read_text()) for path in options.replot], options.plot)
    patterns = [part for part in options.rows.split(",") if part]
    rows = select(patterns, quick=options.quick, long=options.long)
    if options.list:
        print("\n".join(row.key for row in rows))
        return 0
    if not rows:
        print(f"no row has {options.rows!r}; --list prints them all", file=sys.stderr)
        return 2
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else DEFAULT_ROUNDS)
    schedule = Schedule(rounds=rounds, budget_s=BUDGET_S)
    if options.quick:
        schedule = Schedule(rounds=rounds, budget_s=BUDGET_S, repeat_s=QUICK_REPEAT_S)
    wanted, absent = choose_systems(rows, [part for part in options.systems.split(",") if part])
    started = time.perf_counter()
    try:
        results = asyncio.run(measure(rows, wanted, schedule))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("\nstopped", file=sys.stderr)
        return 130
    results.elapsed_s = time.perf_counter() - started
    verdicts = list(judge(results))
    document = report.as_document(results, schedule, verdicts, absent)
    report.print_results(results)
    if options.targets:
        report.print_targets(verdicts)
    report.print_rules(results, schedule)
    report.print_warnings(results, absent)
    print(f"{results.elapsed_s:.0f} s")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
        print(f"figures of every round: {options.json}")
    if options.plot is not None:
        _draw([document], options.plot)
    return 1 if results.failures.keys() - PEERS.keys() else 0


def choose_systems(rows: list[Row], asked: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the systems that these rows need, and those of them that are left out, with the reason."""
    wanted: list[str] = []
    absent: dict[str, str] = {}
    for name in dict.fromkeys(cell.system for row in rows for cell in row.cells.values()):
        if asked and not any(name == one or name.startswith(f"{one}-") for one in asked):
            continue
        if missing := REGISTRY[name].missing():
            absent[name] = f"{', '.join(missing)} is not installed"
        else:
            wanted.append(name)
    return wanted, absent


async def measure(rows: list[Row], systems: list[str], schedule: Schedule) -> Results:
    """Measure one session after another. No process is left behind, even after an error."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    results = Results(rows, schedule.rounds)
    nursery = await Nursery.open()
    try:
        await _measure_sessions(rows, systems, schedule, results, nursery)
    finally:
        await nursery.aclose()
    return results


async def _measure_sessions(
    rows: list[Row], systems: list[str], schedule: Schedule, results: Results, nursery: Nursery
) -> None:
    for session in dict.fromkeys(row.session for row in rows):
        its_rows = [row for row in rows if row.session == session]
        names = dict.fromkeys(cell.system for row in its_rows for cell in row.cells.values())
        pairs = {name: Pair(name, nursery) for name in names if name in systems}
        try:
            await _start(pairs, results)
            await measure_rounds(
                its_rows,
                pairs,
                schedule,
                results,
                lambda number, text: _show_progress(f"round {number + 1}/{schedule.rounds}  {text}"),
            )
            _show_progress("")
            for pair in pairs.values():
                await pair.stop()
        finally:
            for pair in pairs.values():
                await pair.kill()


async def _start(pairs: Mapping[str, Pair], results: Results) -> None:
    """Start all systems that stay, as many at once as there are CPUs. One that fails is retried when it is needed."""
    at_once = asyncio.Semaphore(len(os.sched_getaffinity(0)))

    async def start(name: str, pair: Pair) -> None:
        async with at_once:
            _show_progress(f"starting {name}")
            try:
                await pair.start()
            except MeasurementFailedError as error:
                results.failures[name] = [str(error)]

    async with asyncio.TaskGroup() as group:
        for name, pair in pairs.items():
            if not REGISTRY[name].transient:
                group.create_task(start(name, pair))


def _prepare_plots(options: argparse.Namespace) -> str | None:
    """Return what is missing for plots, before minutes are spent on measuring; None if nothing is."""
    if options.plot is None:
        return "--replot needs to know where to: --plot DIRECTORY"
    try:
        import matplotlib  # noqa: F401, ICN001 - optional: only plots need it
    except ImportError:
        return f"plots need matplotlib: {install_command('bench')}"
    return None


def _draw(documents: list[report.Document], directory: Path) -> int:
    from arpc.bench.plots import draw  # optional: imports matplotlib

    for path in draw(documents, directory):
        print(f"drawn: {path}")
    return 0


def _show_progress(text: str) -> None:
    """Print a line that the next one overwrites, on a terminal only."""
    if sys.stderr.isatty():
        with suppress(OSError):
            print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)
