"""Messages that are lost or late on purpose."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import arpc
import arpc.compat.rpc._testing
from arpc.compat import rpc
from arpc.compat.faults import MESSAGE_NAMES, Faults
from arpc.errors import RpcTimeoutError
from arpc.testing import Cluster, cluster
from tests.compat.blocking_client.test_thread_connections import Other


def one() -> int:
    return 1


class Thing:
    def name(self) -> str:
        return "thing"


_ran = threading.Event()


def tell() -> None:
    _ran.set()


async def test_calls_of_a_kind_are_lost() -> None:
    async with cluster(2) as group:
        Faults(group[0].agent, ["PYTHON_CALL"], {}, 1)
        with pytest.raises(RpcTimeoutError, match="on purpose"):
            await arpc.rpc_async("worker1", one)
        assert await arpc.rpc_async("worker1", torch.add, args=(1, 2)) == 3


async def test_what_is_sent_again_arrives_in_the_end() -> None:
    options = arpc.RpcOptions(gc_freeze=False, control_backoff=0.01)
    async with cluster(2, options=options) as group:
        Faults(group[0].agent, ["RREF_USER_DELETE"], {}, 2)
        rref = arpc.remote("worker1", Thing)
        assert await rref.rpc_sync().name() == "thing"
        await rref.release()
        assert not group[1].rref_context.forks.owned


async def test_a_late_call_is_late_and_its_caller_may_have_given_up() -> None:
    async with cluster(2) as group:
        Faults(group[0].agent, [], {"PYTHON_CALL": 0.05}, 0)
        with pytest.raises(RpcTimeoutError):
            await arpc.rpc_async("worker1", tell, timeout=0.01)
        assert await asyncio.to_thread(_ran.wait, 30)
        assert await arpc.rpc_async("worker1", one) == 1


# -- every message, however often and whichever way it would go


OPTIONS = arpc.RpcOptions(gc_freeze=False, control_backoff=0.005, control_retries=16, shutdown_timeout=30)
ROUNDS = 10


async def echo(value: Any = None) -> Any:
    return value


async def make() -> Thing:
    return Thing()


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", ".torch.jit")

    @torch.jit.script
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2


async def keep(rref: arpc.RRef[Any]) -> None:
    """Receives an RRef, and lets go of it."""


async def call(group: Cluster) -> None:
    await group[0].rpc_sync("worker1", echo)


async def call_with_a_tensor(group: Cluster) -> None:
    await group[0].rpc_sync("worker1", echo, (torch.ones(2),))


async def call_that_is_recorded(group: Cluster) -> None:
    async with arpc.autograd.context():
        await group[0].rpc_sync("worker1", echo, (torch.ones(2, requires_grad=True),))


async def call_in_the_background(group: Cluster) -> None:
    await group[0].rpc_async("worker1", echo, (1,))


async def call_of_a_thread(group: Cluster) -> None:
    await asyncio.to_thread(group[0].rpc_async("worker1", echo, (1,)).wait)


async def call_itself(group: Cluster) -> None:
    await group[0].rpc_sync("worker0", echo)


async def call_a_method(group: Cluster) -> None:
    rref = group[0].remote("worker1", make)
    await rref.rpc_sync().name()


async def call_a_builtin(group: Cluster) -> None:
    await group[0].rpc_sync("worker1", torch.add, (torch.ones(2), 1))


async def call_a_script(group: Cluster) -> None:
    await group[0].rpc_sync("worker1", double, (torch.ones(2),))


async def create(group: Cluster) -> None:
    await group[0].remote("worker1", echo, (1,))


async def create_and_wait(group: Cluster) -> None:
    await group[0].remote("worker1", make)._get_future()


async def create_with_a_builtin(group: Cluster) -> None:
    await group[0].remote("worker1", torch.add, (torch.ones(2), 1))


async def fetch_later(group: Cluster) -> None:
    rref = group[0].remote("worker1", echo, (1,))
    await rref._get_future()
    await rref


async def hand_on(group: Cluster) -> None:
    rref = group[0].remote("worker1", make)
    await rref.rpc_sync().name()
    await group[0].rpc_sync("worker2", keep, (rref,))


async def release(group: Cluster) -> None:
    rref = group[0].remote("worker1", make)
    await rref.rpc_sync().name()
    await rref.release()


SENDERS: list[tuple[str, int, Any]] = [
    ("PYTHON_CALL", 0, call),
    ("PYTHON_CALL", 0, call_with_a_tensor),
    ("PYTHON_CALL", 0, call_that_is_recorded),
    ("PYTHON_CALL", 0, call_in_the_background),
    ("PYTHON_CALL", 0, call_of_a_thread),
    ("PYTHON_CALL", 0, call_itself),
    ("PYTHON_CALL", 0, call_a_method),
    ("SCRIPT_CALL", 0, call_a_builtin),
    ("SCRIPT_CALL", 0, call_a_script),
    ("PYTHON_REMOTE_CALL", 0, create),
    ("PYTHON_REMOTE_CALL", 0, create_and_wait),
    ("SCRIPT_REMOTE_CALL", 0, create_with_a_builtin),
    ("PYTHON_RREF_FETCH_CALL", 0, create),
    ("PYTHON_RREF_FETCH_CALL", 0, fetch_later),
    ("SCRIPT_RREF_FETCH_CALL", 0, create_with_a_builtin),
    ("RREF_FORK_REQUEST", 2, hand_on),
    ("RREF_CHILD_ACCEPT", 2, hand_on),
    ("RREF_USER_DELETE", 0, release),
    ("CLEANUP_AUTOGRAD_CONTEXT_REQ", 0, call_that_is_recorded),
]
AGAIN = {"RREF_FORK_REQUEST", "RREF_CHILD_ACCEPT", "RREF_USER_DELETE", "CLEANUP_AUTOGRAD_CONTEXT_REQ"}
BY_WAY = pytest.mark.parametrize(
    ("name", "sender", "send"), SENDERS, ids=[f"{name}-{send.__name__}" for name, _, send in SENDERS]
)


def test_each_message_is_sent_by_one_of_them() -> None:
    assert {name for name, *_ in SENDERS} == MESSAGE_NAMES


async def _until_more(counts: Counter[str], name: str, before: int) -> None:
    async with asyncio.timeout(30):
        while counts[name] < before:  # noqa: ASYNC110 - nobody can set an event for it
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("is_warm", [False, True], ids=["from the start", "later"])
@BY_WAY
async def test_a_message_is_lost_each_time(name: str, sender: int, send: Any, is_warm: bool) -> None:
    async with cluster(3, options=OPTIONS) as group:
        for _ in range(3 if is_warm else 0):
            await send(group)
        faults = Faults(group[sender].agent, [name], {}, 2)
        for number in range(1, ROUNDS + 1):
            if name in AGAIN:
                await send(group)
                await _until_more(faults.lost, name, 2 * number)  # the third time it arrives
            else:
                with pytest.raises((RpcTimeoutError, arpc.RRefCreationError)):
                    await send(group)
                assert faults.lost[name] == number
        if name in AGAIN and name != "RREF_USER_DELETE":
            assert faults.lost[name] == 2 * ROUNDS


@BY_WAY
async def test_a_message_is_late_each_time(name: str, sender: int, send: Any) -> None:
    async with cluster(3, options=OPTIONS) as group:
        faults = Faults(group[sender].agent, [], {name: 0.001}, 0)
        for number in range(1, ROUNDS + 1):
            await send(group)
            await _until_more(faults.late, name, number)


async def test_a_meter_that_comes_and_goes_changes_nothing() -> None:
    async with cluster(2, options=OPTIONS) as group:
        agent = group[0].agent
        faults = Faults(agent, ["PYTHON_CALL"], {}, 1)
        for meter in (None, _Meter(), None):
            agent.set_meter(meter)
            for _ in range(3):
                with pytest.raises(RpcTimeoutError, match="on purpose"):
                    await group[0].rpc_sync("worker1", echo)
        assert faults.lost["PYTHON_CALL"] == 9


class _Meter:
    """Hears everything, and says nothing."""

    def call_ended(self, *_: Any) -> None: ...
    def handler_ended(self, *_: Any) -> None: ...
    def handler_failed(self, *_: Any) -> None: ...


def test_blocking_calls_of_a_drop_in_are_lost_each_time(tmp_path: Path) -> None:
    place = f"file://{tmp_path}/group"
    other = Other(place)
    other.start()
    options = rpc._testing.FaultyTensorPipeRpcBackendOptions(
        num_worker_threads=4,
        rpc_timeout=20,
        init_method=place,
        messages_to_fail=["SCRIPT_CALL"],
        messages_to_delay={},
        num_fail_sends=1,
    )
    backend = rpc.backend_registry.BackendType.FAULTY_TENSORPIPE
    rpc.init_rpc("drop-in", backend, rank=0, world_size=2, rpc_backend_options=options)
    try:
        for _ in range(ROUNDS):
            assert rpc.rpc_sync("other", one) == 1
            with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
                rpc.rpc_sync("other", torch.add, args=(torch.ones(2), 1))
    finally:
        other.is_left = True
        rpc.shutdown(graceful=False)
        other.leave()
    assert other.error is None


def test_the_names_are_those_of_torch() -> None:
    assert {"PYTHON_REMOTE_CALL", "SCRIPT_RREF_FETCH_CALL", "CLEANUP_AUTOGRAD_CONTEXT_REQ"} < MESSAGE_NAMES
