"""``make conformance``: torch's own RPC tests on arpc.compat, and a table of passed tests by capability.

::

    python -m scripts.conformance                              # all of them: some ten minutes
    python -m scripts.conformance --sample                     # a few of each capability
    python -m scripts.conformance -k 'RpcTest.test_rref' -v    # those that match, with what failed
    python -m scripts.conformance --backend torch -k test_add  # on torch itself

Needs a torch that includes its tests, as its wheels do, and expecttest. A test has four processes, a few have more.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

from scripts.conformance_lists import EXCLUDED, SAMPLE, capability_of

FAMILIES = ("tp", "faulty", "both")
ROOT = Path(__file__).resolve().parent.parent


def arguments(given: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Run torch's own RPC tests on arpc.compat.")
    parser.add_argument("-k", dest="patterns", action="append", default=[], help="only tests that match (or another)")
    parser.add_argument("--sample", action="store_true", help="a fixed sample over all capabilities")
    parser.add_argument("--excluded", action="store_true", help="run those that are excluded, too")
    parser.add_argument("--backend", choices=("arpc", "torch"), default="arpc")
    parser.add_argument("--repeat", type=int, default=1, help="so many times, one run after the other")
    parser.add_argument("--limit", type=int, default=90, help="seconds for one test")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "conformance.jsonl", help="one line of JSON a test"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="show what failed")
    parser.add_argument("--family", choices=FAMILIES, help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Run both families, each in a process of its own, print the table, and return the exit status."""
    options = arguments(given)
    if options.family is not None:
        return run_family(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.unlink(missing_ok=True)
    own = [sys.executable, "-m", "scripts.conformance", *(sys.argv[1:] if given is None else given)]
    for _ in range(options.repeat):
        for family in ("both",) if options.sample else ("tp", "faulty"):
            environment = os.environ | {
                "ARPC_CONFORMANCE_FAMILY": family,
                "ARPC_CONFORMANCE_BACKEND": options.backend,
                "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(options.limit),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            }
            subprocess.run([*own, "--family", family], env=environment, check=False)
    results = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    print_table(results, is_whole=not (options.patterns or options.sample))
    return 1 if not results or any(result["status"] == "fail" for result in results) else 0


def run_family(options: argparse.Namespace) -> int:
    """Run the chosen tests of one family in this process, each with ranks of its own."""
    sys.argv = sys.argv[:1]  # torch's tests read it
    from scripts import conformance_cases as cases  # slow: all of torch's tests

    for name in cases.names():
        if not is_chosen(options, name):
            continue
        result = run_test(cases.CASES, name)
        print(f"{result['status']:4} {result['seconds']:6.2f} s  {name}", flush=True)
        if options.verbose and result["status"] == "fail":
            print(result["text"], flush=True)
        with options.out.open("a") as file:
            file.write(json.dumps(result) + "\n")
    return 0


def is_chosen(options: argparse.Namespace, name: str) -> bool:
    """Whether to run a test."""
    if options.sample:
        return name in SAMPLE
    if options.patterns and not any(re.search(pattern, name) for pattern in options.patterns):
        return False
    return options.excluded or name not in EXCLUDED


def run_test(cases: dict[str, Any], name: str) -> dict[str, Any]:
    """Run one test, and return its outcome."""
    case, _, test = name.partition(".")
    outcome = unittest.TestResult()
    begin = time.perf_counter()
    cases[case](test).run(outcome)
    failed = [*outcome.failures, *outcome.errors]
    status = "fail" if failed else "skip" if outcome.skipped else "pass"
    text = failed[0][1] if failed else outcome.skipped[0][1] if outcome.skipped else ""
    seconds = round(time.perf_counter() - begin, 2)
    return {"test": name, "status": status, "seconds": seconds, "text": text[-4000:]}


def print_table(results: list[dict[str, Any]], *, is_whole: bool) -> None:
    """Print the passed tests per capability, the failed tests by name, and the excluded ones by reason."""
    ran = [result for result in results if result["status"] != "skip"]
    total, passed = Counter[str](), Counter[str]()
    for result in ran:
        capability = capability_of(result["test"])
        total[capability] += 1
        passed[capability] += result["status"] == "pass"
    print(f"\n{'capability':32} {'passed':>7} {'of':>5}")
    for capability in sorted(total):
        print(f"{capability:32} {passed[capability]:7} {total[capability]:5}")
    print(f"{'all':32} {sum(passed.values()):7} {sum(total.values()):5}")
    for result in ran:
        if result["status"] == "fail":
            print(f"failed: {result['test']}")
    if is_whole:
        print(f"\nleft out: {len(EXCLUDED)}")
        for reason, count in Counter(EXCLUDED.values()).items():
            print(f"  {count:3}  {reason}")


if __name__ == "__main__":
    sys.exit(main())
