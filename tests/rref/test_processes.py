"""Workers in processes of their own, which can be killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import arpc
from arpc.options import RpcOptions
from tests.rref.conftest import until

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = RpcOptions(gc_freeze=False, rref_grace=0.5, control_backoff=0.1)
PEER = """
import asyncio, sys, arpc
from tests.rref.test_processes import OPTIONS
async def main():
    async with arpc.init_rpc(sys.argv[1], rank=1, world_size=2, init_method=sys.argv[2], options=OPTIONS):
        pass
arpc.run(main)
"""
held: list[arpc.RRef[object]] = []


def hold(rref: arpc.RRef[object]) -> int:
    held.append(rref)
    return os.getpid()


async def forever() -> None:
    await asyncio.Event().wait()


class Peer:
    """Another process with one worker, in a group with this one."""

    def __init__(self, folder: Path) -> None:
        self.place = f"file://{folder}/group"
        command = [sys.executable, "-c", PEER, "peer", self.place]
        self.process = subprocess.Popen(command, cwd=ROOT)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def peer(tmp_path):
    started = Peer(tmp_path)
    yield started
    if started.process.poll() is None:
        started.kill()


async def test_a_killed_user_is_reclaimed_at_once(peer):
    # the grace is for those who can come back, and where nobody listens any more nobody can
    options = OPTIONS.replace(rref_grace=600.0)
    worker = await arpc.init_rpc("here", rank=0, world_size=2, init_method=peer.place, options=options)
    try:
        rref = arpc.RRef([1, 2, 3])
        assert await arpc.rpc_sync("peer", hold, (rref,)) == peer.process.pid
        del rref
        (row,) = worker.rrefs()
        assert row.forks == {"peer": 1}
        peer.kill()
        await until(lambda: not worker.rrefs())
    finally:
        await arpc.shutdown(graceful=False)


async def test_a_killed_owner_is_noticed_at_once(peer):
    await arpc.init_rpc("here", rank=0, world_size=2, init_method=peer.place, options=OPTIONS)
    try:
        rref = arpc.remote("peer", list, ((1, 2),))
        assert await rref == [1, 2]
        waiting = arpc.remote("peer", forever)
        fetch = asyncio.ensure_future(waiting.to_here())
        await rref.rpc_sync().append(3)
        killed = time.monotonic()
        peer.kill()
        with pytest.raises(arpc.OwnerLostError):
            await fetch
        with pytest.raises(arpc.OwnerLostError):
            await rref
        assert time.monotonic() - killed < 20
        await until(lambda: not rref.confirmed_by_owner())
        with pytest.raises(arpc.OwnerLostError, match="the owner of UserRRef"):
            await rref
    finally:
        await arpc.shutdown(graceful=False)


def test_rrefs_at_interpreter_exit(tmp_path):
    """Handles outlive the worker, the loop and most of the interpreter, without a word."""
    program = """
import asyncio, arpc
from arpc.testing import cluster
kept = []
async def main():
    asyncio.get_running_loop().slow_callback_duration = 60  # on a busy machine, the start of a worker is slow
    async with cluster(2):
        kept.append(arpc.remote("worker1", list))
        kept.append(arpc.RRef(kept))
        await kept[0]
    kept.append(kept)
arpc.run(main)
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
