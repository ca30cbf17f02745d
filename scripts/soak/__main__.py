"""``make soak``: workers under load and faults for some seconds. Prints why, and exits with 1, if a promise breaks."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from multiprocessing import forkserver
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

import arpc
from scripts.soak.network import Network
from scripts.soak.operations import FAMILIES
from scripts.soak.orphans import Orphans
from scripts.soak.records import read_records
from scripts.soak.report import Report
from scripts.soak.runner import Runner
from scripts.soak.workers import ALLOCATOR, OPTIONS, Plan, WorkerProcess

_ORPHANS_END_S = 10.0
"""Seconds: children that handlers fork live for less than this."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long faults go on (default: 60)")
    parser.add_argument("--seed", type=int, help="of everything that is random; a new one if not given")
    parser.add_argument("--workers", type=int, default=4, help="how many there are (default: 4)")
    parser.add_argument("--tasks", type=int, default=2, help="tasks for each operation in each worker (default: 2)")
    parser.add_argument("--calm", type=float, default=3.0, help="seconds between two faults on average (default: 3)")
    parser.add_argument("--only", nargs="+", choices=list(FAMILIES), default=list(FAMILIES), help="operations to run")
    parser.add_argument("--no-network", action="store_true", help="without network namespaces")
    parser.add_argument("--no-visitors", action="store_true", help="without workers that join under new names")
    parser.add_argument("--json", type=Path, help="write the figures to a file as well")
    parser.add_argument("--keep", type=Path, help="keep event logs and logs in this folder")
    chosen = parser.parse_args(arguments)
    if chosen.workers < 2:
        parser.error("it takes at least 2 workers")
    return chosen


def plans(chosen: argparse.Namespace, seed: int, network: Network | None, store: str, where: Path) -> list[Plan]:
    """Return the plans: half of the workers get hosts of their own; the others share this one, and its memory."""
    made = []
    here = network.address if network is not None else "127.0.0.1"
    families = tuple(chosen.only)
    for number in range(chosen.workers):
        name = f"worker{number}"
        listen: tuple[str, ...] = ("unix://", f"tcp://{here}:0")
        namespace = None
        if network is not None and number % 2 == 0:
            listen = (f"tcp://{network.address_of(name)}:0",)
            namespace = network.namespace(name)
        made.append(Plan(name, store, where, where / "run", seed, chosen.tasks, families, listen, namespace))
    if not chosen.no_visitors:
        listen = ("unix://", f"tcp://{here}:0")
        made.append(Plan("visitors", store, where, where / "run", seed, 1, families, listen, is_visitor=True))
    return made


def open_network(chosen: argparse.Namespace) -> Network | None:
    """Make hosts for the workers that will be cut off; None if this user may not make them."""
    if chosen.no_network:
        return None
    try:
        return Network([f"worker{number}" for number in range(0, chosen.workers, 2)])
    except OSError as error:
        print(f"no worker is cut off: {error}")
        return None


def main() -> int:
    """Run a soak; return the exit code."""
    chosen = parse()
    seed = chosen.seed if chosen.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}", flush=True)
    logging.basicConfig(level=logging.WARNING, format="%(relativeCreated)d %(levelname)s %(name)s: %(message)s")
    with ExitStack() as stack:
        where = chosen.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="arpc-soak-", dir="/tmp")))
        (where / "run").mkdir(parents=True)
        os.environ["XDG_RUNTIME_DIR"] = str(where / "run")
        network = open_network(chosen)
        if network is not None:
            stack.callback(network.close)
        os.environ |= ALLOCATOR
        orphans = Orphans()
        forkserver.ensure_running()
        orphans.own()
        here = network.address if network is not None else "127.0.0.1"
        # in this process, which no fault hits
        store = TCPStore(here, 0, is_master=True, wait_for_workers=False)
        processes = [WorkerProcess(plan) for plan in plans(chosen, seed, network, f"tcp://{here}:{store.port}", where)]
        workers = [process for process in processes if not process.plan.is_visitor]
        visitors = next((process for process in processes if process.plan.is_visitor), None)
        runner = Runner(workers, visitors, network, seed)
        begin = time.monotonic()

        async def run() -> None:
            options = OPTIONS.replace(listen=("unix://", f"tcp://{here}:0"))
            async with arpc.init_rpc("runner", world_size=None, store=store, options=options) as me:
                try:
                    await runner.run(me, chosen.seconds, chosen.calm)
                finally:
                    await asyncio.shield(runner.kill_all())

        arpc.run(run)
        seconds = time.monotonic() - begin
        runner.findings.orphans = orphans.reap(_ORPHANS_END_S)
        sockets = sorted(str(path.relative_to(where)) for path in (where / "run").rglob("*.sock"))
        report = Report(seed, seconds, read_records(where), runner.findings, sockets)
    print(report.text())
    if chosen.json is not None:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps(report.figures(), indent=1))
    return 1 if report.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
