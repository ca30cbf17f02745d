"""``make soak``: a trial of so many seconds. Ends with 1, and says why, if anything does not add up."""

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
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

import arpc
from scripts.soak.director import Director
from scripts.soak.ledger import read_books
from scripts.soak.network import Network
from scripts.soak.report import Report
from scripts.soak.workers import OPTIONS, Plan, WorkerProcess


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m scripts.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long faults go on (default: 60)")
    parser.add_argument("--seed", type=int, help="of everything that is left to chance; a new one if not given")
    parser.add_argument("--workers", type=int, default=4, help="how many there are (default: 4)")
    parser.add_argument("--tasks", type=int, default=3, help="tasks for each kind of load in each worker (default: 3)")
    parser.add_argument("--calm", type=float, default=3.0, help="seconds between two faults on average (default: 3)")
    parser.add_argument("--no-network", action="store_true", help="without network namespaces")
    parser.add_argument("--json", type=Path, help="write the figures to a file as well")
    parser.add_argument("--keep", type=Path, help="keep books and logs in this folder")
    chosen = parser.parse_args(arguments)
    if chosen.workers < 2:
        parser.error("it takes at least 2 workers")
    return chosen


def plans(chosen: argparse.Namespace, seed: int, network: Network | None, store: str, where: Path) -> list[Plan]:
    """Half of the workers are on hosts of their own; the others share this one, and its memory."""
    made = []
    for number in range(chosen.workers):
        name = f"worker{number}"
        far = network is not None and number % 2 == 0
        here = network.address if network is not None else "127.0.0.1"
        listen: tuple[str, ...] = ("unix://", f"tcp://{here}:0")
        if network is not None and far:
            listen = (f"tcp://{network.address_of(name)}:0",)
        namespace = network.namespace(name) if network is not None and far else None
        made.append(Plan(name, store, where, where / "run", seed, chosen.tasks, listen, namespace))
    return made


def open_network(chosen: argparse.Namespace) -> Network | None:
    """Hosts for those who are to be cut off; None where this user may not make them."""
    if chosen.no_network:
        return None
    try:
        return Network([f"worker{number}" for number in range(0, chosen.workers, 2)])
    except OSError as error:
        print(f"nobody is cut off: {error}")
        return None


def main() -> int:
    """Run a trial; the exit code."""
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
        here = network.address if network is not None else "127.0.0.1"
        # hosted by nobody who may be killed
        store = TCPStore(here, 0, is_master=True, wait_for_workers=False)
        made = plans(chosen, seed, network, f"tcp://{here}:{store.port}", where)
        director = Director([WorkerProcess(plan) for plan in made], network, seed)
        begin = time.monotonic()

        async def conduct() -> None:
            options = OPTIONS.replace(listen=("unix://", f"tcp://{here}:0"))
            async with arpc.init_rpc("director", world_size=None, store=store, options=options) as me:
                try:
                    await director.run(me, chosen.seconds, chosen.calm)
                finally:
                    await asyncio.shield(director.kill_all())

        arpc.run(conduct)
        sockets = sorted(str(path.relative_to(where)) for path in (where / "run").rglob("*.sock"))
        report = Report(
            seed=seed,
            seconds=time.monotonic() - begin,
            books=read_books(where),
            findings=director.findings,
            sockets=sockets,
        )
    print(report.text())
    if chosen.json is not None:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps(report.figures(), indent=1))
    return 1 if report.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
