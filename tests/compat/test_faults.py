"""Messages that are lost or late on purpose."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

import arpc
from arpc.compat.faults import MESSAGE_NAMES, Faults
from arpc.errors import RpcTimeoutError
from arpc.testing import cluster


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


def test_the_names_are_those_of_torch() -> None:
    assert {"PYTHON_REMOTE_CALL", "SCRIPT_RREF_FETCH_CALL", "CLEANUP_AUTOGRAD_CONTEXT_REQ"} < MESSAGE_NAMES
