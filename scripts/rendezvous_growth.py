"""The cost of a group's rendezvous as it grows: 2 to 64 workers, each in a process of its own.

    python -m scripts.rendezvous_growth --plot docs/images

The processes are forked from one that has imported torch, wait for each other, and then all call `init_rpc` at once,
with a store as `arpc launch` and torchrun serve it. The script measures the time until the last one is up, the time of
a barrier after that, and for each worker its CPU time, its operations on the store and its connections.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, NamedTuple

import arpc
from arpc.launch.meeting import StoreServer
from arpc.launch.plan import MeetingPoint, as_group, environment_of

SIZES: Final = (2, 4, 8, 16, 32, 64)


class Figures(NamedTuple):
    """The figures of one worker."""

    up_at: float
    barrier_s: float
    cpu_s: float
    operations: int
    polls: int
    connections: int


def run_worker(environment: dict[str, str], pipe: Connection) -> None:
    """Run one worker: the target of each process."""
    os.environ.update(environment)
    pipe.send("ready")
    pipe.recv()
    pipe.send(arpc.run(join))


async def join() -> Figures:
    """Join, pass a barrier, and return the figures of that."""
    cpu_s = time.process_time()
    # without the garbage collection at the start, which takes each worker 100 ms, however large the group is
    async with arpc.init_rpc(options=arpc.RpcOptions(gc_freeze=False)) as worker:
        up_at = time.monotonic()
        await worker.rendezvous.gather("barrier", b"", timeout_s=60)
        found = worker.statistics()["rendezvous"]
        return Figures(
            up_at,
            time.monotonic() - up_at,
            time.process_time() - cpu_s,
            found["store_operations"],
            found["store_polls"],
            sum(peer.connection is not None for peer in worker.agent.peers),
        )


async def measure(size: int) -> tuple[float, list[Figures]]:
    """Run one group; return the seconds until all were up, and the figures of each worker."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["arpc._public", "uvloop"])
    server = StoreServer()
    await server.serve()
    meeting = MeetingPoint(server.host, server.port)
    workers = []
    try:
        for slot in as_group(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=run_worker, args=(environment_of(slot, meeting, {}), theirs), daemon=True)
            process.start()
            theirs.close()
            workers.append((process, ours))
        for _, pipe in workers:
            await asyncio.to_thread(pipe.recv)
        started = time.monotonic()
        for _, pipe in workers:
            pipe.send("go")
        figures: list[Figures] = [await asyncio.to_thread(pipe.recv) for _, pipe in workers]
        return max(one.up_at for one in figures) - started, figures
    finally:
        for process, pipe in workers:
            await asyncio.to_thread(process.join, 20)
            process.kill()
            process.join()
            pipe.close()
        await server.aclose()


async def measure_all(rounds: int) -> list[dict[str, float]]:
    """Return the best of some rounds for each size: other work on the machine can only add time."""
    rows = []
    for size in SIZES:
        found = [await measure(size) for _ in range(rounds)]
        everyone = [one for _, figures in found for one in figures]
        row = {
            "workers": float(size),
            "up_ms": 1e3 * min(up_s for up_s, _ in found),
            "barrier_ms": 1e3 * min(max(one.barrier_s for one in figures) for _, figures in found),
            "cpu_ms": 1e3 * min(statistics.mean(one.cpu_s for one in figures) for _, figures in found),
            "operations": min(statistics.mean(one.operations for one in figures) for _, figures in found),
            "polls": min(statistics.mean(one.polls for one in figures) for _, figures in found),
            "connections": float(max(one.connections for one in everyone)),
        }
        rows.append(row)
        print("   ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    return rows


def draw(rows: Sequence[dict[str, float]], directory: Path) -> Path:
    """Draw two panels: time for the group, and work for each worker; return the path of the picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sizes = [row["workers"] for row in rows]
    figure = Figure(figsize=(9, 3.4), dpi=160, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    time_panel, work_panel = figure.subplots(1, 2)
    for name, label, colour in (("up_ms", "all workers are up", "#d9480f"), ("barrier_ms", "a barrier", "#5c6bc0")):
        time_panel.plot(sizes, [row[name] for row in rows], "o-", color=colour, label=label)
    time_panel.set_title("for the whole group", fontsize=10)
    time_panel.set_ylabel("milliseconds")
    for name, label, colour in (
        ("cpu_ms", "CPU time, ms", "#d9480f"),
        ("operations", "operations on the store", "#5c6bc0"),
        ("connections", "connections to peers", "#8a949e"),
    ):
        work_panel.plot(sizes, [row[name] for row in rows], "o-", color=colour, label=label)
    work_panel.set_title("for each worker", fontsize=10)
    for panel in (time_panel, work_panel):
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [f"{size:.0f}" for size in sizes])
        panel.set_xlabel("workers")
        panel.grid(color="#d0d7de", linewidth=0.5)
        panel.legend(frameon=False, fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    time_panel.set_yscale("log")  # linear growth is a straight line, quadratic growth a steeper one
    time_panel.set_xlabel(f"workers, on {os.cpu_count()} CPUs")
    work_panel.set_ylim(bottom=0)
    path = directory / "rendezvous-growth.png"
    figure.savefig(path)
    return path


def main() -> int:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of which the best counts (5)")
    parser.add_argument("--plot", type=Path, metavar="DIRECTORY", help="draw it there; takes matplotlib")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go")
    arguments = parser.parse_args()
    rows = asyncio.run(measure_all(arguments.rounds))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    if arguments.plot is not None:
        print(f"drawn: {draw(rows, arguments.plot)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
