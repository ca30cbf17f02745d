"""``python -m arpc.bench``: see ``--help``."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from pathlib import Path

from arpc.bench import report
from arpc.bench.pairs import MeasurementFailedError, Pair
from arpc.bench.rounds import Results, Schedule, measure_rounds
from arpc.bench.rows import Row, select
from arpc.bench.systems import REGISTRY
from arpc.bench.targets import judge

DEFAULT_ROUNDS = 7
QUICK_ROUNDS = 3
DEFAULT_BUDGET_S = 0.15
QUICK_BUDGET_S = 0.1
QUICK_REPEAT_S = 5.0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m arpc.bench", description=__doc__)
    parser.add_argument("--rows", default="", help="only rows whose key has one of these (commas; * as in a shell)")
    parser.add_argument("--systems", default="", help=f"only these (commas), of: {', '.join(REGISTRY)}; or a prefix")
    parser.add_argument("--rounds", type=int, help=f"{DEFAULT_ROUNDS}, or {QUICK_ROUNDS} with --quick")
    parser.add_argument(
        "--quick", action="store_true", help="a look within a minute: few rounds, short cells, fewer rows"
    )
    parser.add_argument("--long", action="store_true", help="also the rows that take minutes")
    parser.add_argument("--targets", action="store_true", help="each target with what was measured: pass or miss")
    parser.add_argument(
        "--json", type=Path, default=Path("build/bench.json"), help="where the figures go (%(default)s)"
    )
    parser.add_argument("--list", action="store_true", help="print the keys of the rows and stop")
    return parser.parse_args(arguments)


def main() -> int:
    """Measures what was asked for and reports it; returns the exit status, 1 if a system failed."""
    options = parse()
    patterns = [part for part in options.rows.split(",") if part]
    rows = select(patterns, quick=options.quick, long=options.long)
    if options.list:
        print("\n".join(row.key for row in rows))
        return 0
    if not rows:
        print(f"no row has {options.rows!r}; --list prints them all", file=sys.stderr)
        return 2
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else DEFAULT_ROUNDS)
    schedule = Schedule(rounds=rounds, budget_s=DEFAULT_BUDGET_S)
    if options.quick:
        schedule = Schedule(rounds=rounds, budget_s=QUICK_BUDGET_S, repeat_s=QUICK_REPEAT_S)
    wanted, absent = choose_systems(rows, [part for part in options.systems.split(",") if part])
    started = time.perf_counter()
    try:
        results = asyncio.run(run(rows, wanted, schedule))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("\nstopped", file=sys.stderr)
        return 130
    verdicts = list(judge(results))
    report.write_json(options.json, results, schedule, verdicts, absent)
    report.print_results(results)
    if options.targets:
        report.print_targets(verdicts)
    report.print_rules(results, schedule)
    report.print_warnings(results, absent)
    print(f"{time.perf_counter() - started:.0f} s; figures of every round: {options.json}")
    return 1 if results.failures else 0


def choose_systems(rows: list[Row], asked: list[str]) -> tuple[list[str], dict[str, str]]:
    """The systems that these rows need, and those of them that are left out, with the reason."""
    wanted: list[str] = []
    absent: dict[str, str] = {}
    for name in dict.fromkeys(cell.system for row in rows for cell in row.cells.values()):
        if asked and not any(name == one or name.startswith(f"{one}-") for one in asked):
            continue
        if missing := REGISTRY[name].missing():
            absent[name] = f"not installed: {', '.join(missing)}"
        else:
            wanted.append(name)
    return wanted, absent


async def run(rows: list[Row], systems: list[str], schedule: Schedule) -> Results:
    """Starts every pair, measures, and leaves no process behind whatever happens."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    pairs = {name: Pair(name) for name in systems}
    failures: dict[str, list[str]] = {}
    try:
        for name, pair in list(pairs.items()):
            show_progress(f"starting {name}")
            try:
                await pair.start()
            except MeasurementFailedError as error:
                failures[name] = [str(error)]
                del pairs[name]
        results = await measure_rounds(
            rows, pairs, schedule, lambda number, text: show_progress(f"round {number + 1}/{schedule.rounds}  {text}")
        )
        results.failures.update(failures)
        show_progress("")
        for pair in pairs.values():
            await pair.stop()
        return results
    finally:
        for pair in pairs.values():
            await pair.kill()


def show_progress(text: str) -> None:
    """One line that is written over, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
