"""Blocking calls of the drop-in to another worker: the same on a thread connection as over the loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import arpc
from arpc.compat import current, rpc
from arpc.compat.drop_in import DropIn

OTHER = "other"


class Other(threading.Thread):
    """A worker with a loop of its own, in a thread of this process."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self._place = place
        self.error: BaseException | None = None
        self.is_left = False
        """The drop-in has gone without it."""
        self._loop: asyncio.AbstractEventLoop
        self._leaving: asyncio.Event

    def leave(self) -> None:
        """Shut it down, with the group or without."""
        self._loop.call_soon_threadsafe(self._leaving.set)
        self.join(30)

    def run(self) -> None:
        try:
            arpc.run(self._main)
        except BaseException as error:  # noqa: BLE001 - the fixture raises it
            self.error = error

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._leaving = asyncio.Event()
        options = arpc.RpcOptions(gc_freeze=False)
        worker = await arpc.init_rpc(OTHER, rank=1, world_size=2, init_method=self._place, options=options)
        await self._leaving.wait()
        await worker.shutdown(graceful=not self.is_left)


class Way:
    """How blocking calls go, and the proof of it."""

    def __init__(self, drop_in: DropIn, kind: str) -> None:
        self._drop_in = drop_in
        self.is_of_thread = kind == "thread"
        drop_in.blocking.is_on = self.is_of_thread

    def open(self, *functions: Any) -> None:
        """Have the functions known to the peer, and a connection, if calls shall go that way."""
        peer = self._drop_in.agent.known_peer(OTHER)
        for function in (echo, *functions):
            self._drop_in.agent.prepare(peer, function, (), None)
        end = time.monotonic() + 20
        while self.is_of_thread and not (peer.thread_connections is not None and peer.thread_connections.free):
            assert time.monotonic() < end
            rpc.rpc_sync(OTHER, echo)

    @property
    def calls(self) -> int:
        """Made on connections."""
        connections = self._drop_in.agent.known_peer(OTHER).thread_connections
        return 0 if connections is None else connections.calls_made


@pytest.fixture(params=["thread", "loop"])
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Way]:
    place = f"file://{tmp_path}/group"
    other = Other(place)
    other.start()
    options = rpc.TensorPipeRpcBackendOptions(init_method=place, num_worker_threads=4)
    rpc.init_rpc("script", rank=0, world_size=2, rpc_backend_options=options)
    chosen = Way(current.get_agent().drop_in, request.param)
    chosen.open(fail, sleep, torch.add, keep, kept)
    yield chosen
    _gate.set()
    if rpc._is_current_rpc_agent_set():
        leaving = threading.Thread(target=other.leave)
        leaving.start()
        rpc.shutdown()
        leaving.join()
    else:
        other.is_left = True
        other.leave()
    assert other.error is None


def echo(value: Any = None) -> Any:
    return value


def fail(text: str) -> None:
    raise KeyError(text)


_gate = threading.Event()
_begun = threading.Event()


def sleep() -> str:
    _begun.set()
    _gate.wait(20)
    return "slept"


_kept: list[Any] = []


def keep(value: Any) -> None:
    _kept[:] = [value]


def kept() -> Any:
    return _kept[0]


def test_results_and_errors_are_the_same(way: Way) -> None:
    before = way.calls
    assert rpc.rpc_sync(OTHER, echo) is None
    assert rpc.rpc_sync(1, echo, args=[7]) == 7
    assert rpc.rpc_sync(OTHER, echo, kwargs={"value": {"a": [1, 2]}}, timeout=20) == {"a": [1, 2]}
    assert torch.equal(rpc.rpc_sync(OTHER, torch.add, args=(torch.ones(2), 1)), torch.full((2,), 2.0))
    with pytest.raises(KeyError, match=r"On WorkerInfo\(id=1, name=other\)"):
        rpc.rpc_sync(OTHER, fail, args=("not here",))
    with pytest.raises(RuntimeError, match="Overloaded torch operator invoked from Python failed to match any schema"):
        rpc.rpc_sync(OTHER, torch.add, args=())
    with pytest.raises(TypeError, match="pickle"):
        rpc.rpc_sync(OTHER, echo, args=(threading.Lock(),))
    assert way.calls - before == (6 if way.is_of_thread else 0)


def test_a_timeout_is_told_in_the_words_of_torch(way: Way) -> None:
    _gate.clear()
    with pytest.raises(RuntimeError, match=r"RPCErr:1:RPC ran for more than set timeout \(50 ms\)"):
        rpc.rpc_sync(OTHER, sleep, timeout=0.05)
    assert rpc.rpc_sync(OTHER, echo, args=(1,)) == 1
    _gate.set()
    assert [rpc.rpc_sync(OTHER, sleep) for _ in range(3)] == ["slept"] * 3


def test_rrefs_find_their_way(way: Way) -> None:
    rref = rpc.remote(OTHER, echo, args=([1, 2],))
    rpc.rpc_sync(OTHER, keep, args=({"rref": rref},))
    back = rpc.rpc_sync(OTHER, kept)["rref"]
    assert back.to_here() == [1, 2]
    assert back.owner_name() == OTHER
    mine = rpc.RRef(5)
    assert rpc.rpc_sync(OTHER, echo, args=(mine,)).local_value() == 5
    _kept.clear()


def test_debug_info_counts_calls_under_way(way: Way) -> None:
    _gate.clear()
    _begun.clear()
    thread = threading.Thread(target=rpc.rpc_sync, args=(OTHER, sleep))
    thread.start()
    assert _begun.wait(20)
    assert current.get_agent().get_debug_info()["agent.client_active_calls"] == "1"
    _gate.set()
    thread.join(20)
    assert not thread.is_alive()


def test_many_threads_call_at_once(way: Way) -> None:
    found: dict[int, list[int]] = {}

    def work(number: int) -> None:
        found[number] = [rpc.rpc_sync(OTHER, echo, args=(number * 100 + n,)) for n in range(25)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [number * 100 + n for n in range(25)] for number in range(8)}


def test_shutdown_ends_a_call_under_way(way: Way) -> None:
    _gate.clear()
    errors: list[BaseException] = []

    def block() -> None:
        try:
            rpc.rpc_sync(OTHER, sleep)
        except RuntimeError as error:
            errors.append(error)

    _begun.clear()
    thread = threading.Thread(target=block)
    thread.start()
    assert _begun.wait(20)
    rpc.shutdown(graceful=False)
    thread.join(20)
    assert [str(error) for error in errors] == ["this worker was shut down before sleep ended"]
