"""Workers that speak TLS with each other."""

from __future__ import annotations

import contextlib

import pytest
import torch

import arpc
from arpc.options import RpcOptions
from arpc.testing import cluster
from arpc.transport.striping import Lanes
from arpc.transport.tls import SecureConnection, TlsTransport
from tests.agent.leftovers import assert_nothing_left
from tests.agent.peers.test_bulk_connections import have_lanes
from tests.agent.stage import echo
from tests.certificates import tls_for

MIB = 1 << 20
TCP = RpcOptions(gc_freeze=False, shared_memory_bytes=0, listen=("tcp://127.0.0.1:0",))


@contextlib.asynccontextmanager
async def secure_pair(name: str = "worker*", **options):
    tls = tls_for(name)
    async with cluster(2, options=TCP.replace(tls=tls, **options), transports={"tcp": TlsTransport(tls)}) as group:
        yield group


async def test_calls_and_large_tensors():
    async with secure_pair() as group:
        assert await group[0].rpc_sync("worker1", echo, args=("text",)) == "text"
        large = torch.arange(3 * MIB)
        assert torch.equal(await group[0].rpc_sync("worker1", echo, args=(large,)), large)
        assert isinstance(group[0].agent.known_peer("worker1").connection, SecureConnection)
        await assert_nothing_left(group)


async def test_lanes():
    async with secure_pair(bulk_connections=2) as group:
        await group[0].rpc_sync("worker1", echo)
        await have_lanes(group, 2)
        large = torch.arange(2 * MIB)
        assert torch.equal(await group[1].rpc_sync("worker0", echo, args=(large,)), large)
        assert group[0].statistics()["peers"]["worker1"]["lane_bytes_sent"] > large.nbytes
        route = group[0].agent.known_peer("worker1").connection.lanes
        assert isinstance(route, Lanes)
        assert all(isinstance(lane, SecureConnection) for lane in route.connections)


async def test_a_worker_with_the_certificate_of_another_is_kept_out():
    async with secure_pair("somebody") as group:
        with pytest.raises(arpc.AuthenticationError, match="'worker1', with a certificate for somebody"):
            await group[0].rpc_sync("worker1", echo)


async def test_a_secret_counts_besides():
    async with secure_pair(secret=b"a secret of many bytes") as group:
        assert await group[0].rpc_sync("worker1", echo, args=(1,)) == 1
