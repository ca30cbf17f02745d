"""A worker written with the async API and a drop-in are peers in one group."""

from __future__ import annotations

import atexit
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import arpc
from arpc.compat import current, rpc

SCRIPT, NATIVE = "script", "native"


class Counter:
    def __init__(self) -> None:
        self.total = 0

    def add(self, n: int) -> int:
        self.total += n
        return self.total


def blocking_sum(counter: rpc.RRef[Counter], n: int) -> int:
    """Runs on the drop-in: it blocks, and calls back."""
    total: int = counter.rpc_sync().add(n)
    two: int = rpc.rpc_sync(NATIVE, len, args=([1, 2],))
    return total + two


async def awaiting_sum(counter: arpc.RRef[Counter], n: int) -> int:
    """Runs on the other one: it awaits."""
    assert type(counter) is arpc.RRef
    total: int = await counter.rpc_sync().add(n)
    two: int = await arpc.rpc_sync(SCRIPT, len, args=([1, 2],))
    return total + two


def fail() -> None:
    raise KeyError("not here")


class Native(threading.Thread):
    """The worker with the async API, with its own loop, in a thread."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self._place = place
        self.found: list[object] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            arpc.run(self._main)
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.error = error

    async def _main(self) -> None:
        options = arpc.RpcOptions(gc_freeze=False)
        async with arpc.init_rpc(NATIVE, rank=1, world_size=2, init_method=self._place, options=options):
            counter = arpc.remote(NATIVE, Counter)
            self.found.append(await arpc.rpc_sync(SCRIPT, blocking_sum, args=(counter, 5)))
            self.found.append(await arpc.rpc_sync(SCRIPT, torch.add, args=(torch.ones(1), 1)))
            try:
                await arpc.rpc_sync(SCRIPT, fail)
            except KeyError as error:
                self.found.append(type(error.__cause__))


def test_both_call_each_other_and_leave_together(tmp_path: Path) -> None:
    place = f"file://{tmp_path}/group"
    native = Native(place)
    native.start()
    options = rpc.TensorPipeRpcBackendOptions(init_method=place)
    rpc.init_rpc(SCRIPT, rank=0, world_size=2, rpc_backend_options=options)
    counter = rpc.remote(SCRIPT, Counter)
    assert rpc.rpc_sync(NATIVE, awaiting_sum, args=(counter, 3)) == 5
    elsewhere = rpc.remote(NATIVE, Counter)
    assert elsewhere.rpc_sync().add(2) == 2
    assert elsewhere.remote().add(2).to_here() == 4
    with pytest.raises(KeyError, match="On WorkerInfo"):
        rpc.rpc_sync(NATIVE, fail)
    del elsewhere
    rpc.shutdown()
    native.join(30)
    assert not native.is_alive()
    assert native.error is None
    assert native.found == [7, torch.tensor([2.0]), arpc.RemoteTraceback]


begun = threading.Event()


def let_script_end() -> int:
    begun.set()
    time.sleep(0.1)
    return 7


class Caller(Native):
    """Calls the other one, which ends without a word because of that."""

    async def _main(self) -> None:
        options = arpc.RpcOptions(gc_freeze=False, rref_grace=0.1)
        worker = await arpc.init_rpc(NATIVE, rank=1, world_size=2, init_method=self._place, options=options)
        try:
            self.found.append(await arpc.rpc_sync(SCRIPT, let_script_end))
        finally:
            await worker.shutdown(graceful=False)


@pytest.mark.parametrize("is_forked", [False, True])
def test_a_script_that_ends_without_a_shutdown_answers_first(tmp_path, monkeypatch, is_forked) -> None:
    at_exit: list[Callable[[], object]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    is_busy: list[bool] = []
    begun.clear()
    place = f"file://{tmp_path}/group"
    caller = Caller(place)
    caller.start()
    options = rpc.TensorPipeRpcBackendOptions(init_method=place)
    rpc.init_rpc(SCRIPT, rank=0, world_size=2, rpc_backend_options=options)
    drop_in = current.get_agent().drop_in
    try:
        assert begun.wait(30)
        with monkeypatch.context() as patch:
            look = partial(drop_in.thread.call, drop_in.agent.connector.busy_links)
            patch.setattr(drop_in, "_stop", lambda: is_busy.append(look()))
            if is_forked:
                assert drop_in._finalizer.still_active()  # as one of those that a forked process runs at its end
                drop_in._finalizer()
            else:
                (leave,) = at_exit
                leave()
        assert is_busy == [False]
        caller.join(30)
        assert caller.error is None
        assert caller.found == [7]
    finally:
        rpc.shutdown(graceful=False)
    assert not drop_in._finalizer.still_active()


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_process_that_a_script_forks_ends_by_itself(tmp_path, monkeypatch) -> None:
    at_exit: list[Callable[[], object]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/group")
    rpc.init_rpc(SCRIPT, rank=0, world_size=1, rpc_backend_options=options)
    try:
        (leave,) = at_exit
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            leave()
            os._exit(7)
        os.close(writing)
        has_ended, _, _ = select.select([reading], [], [], 10)  # of a pipe that nobody else writes to
        os.close(reading)
        if not has_ended:
            os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert rpc.rpc_sync(SCRIPT, len, args=([1, 2],)) == 2
    finally:
        rpc.shutdown()
