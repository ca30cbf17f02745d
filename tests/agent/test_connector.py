"""Connections: who may come in, who is found where, and what becomes of attempts that fail."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from arpc.agent.membership import WorkerRecord
from arpc.errors import AuthenticationError, WireError, WorkerLostError
from arpc.options import RpcOptions
from arpc.testing import cluster
from tests.agent.leftovers import assert_both_alive, assert_nothing_left
from tests.agent.stage import echo


async def test_another_worker_at_the_address_is_not_mistaken_for_the_right_one(monkeypatch):
    async with cluster(3) as group:
        agent = group[0].agent
        resolve = agent.resolve

        async def resolve_wrongly(to: Any) -> WorkerRecord:
            return msgspec.structs.replace(await resolve(to), addresses=(await resolve("worker2")).addresses)

        monkeypatch.setattr(agent, "resolve", resolve_wrongly)
        with pytest.raises(WorkerLostError, match=r"found worker 'worker2' where 'worker1' was to be"):
            await group[0].rpc_sync("worker1", echo)
        monkeypatch.setattr(agent, "resolve", resolve)
        await assert_both_alive(group)
        await assert_nothing_left(group)


async def test_a_worker_that_shuts_down_lets_nobody_in():
    async with cluster(2) as group:
        group[1].agent.is_closing = True
        with pytest.raises(WorkerLostError, match="is shutting down"):
            await group[0].rpc_sync("worker1", echo)
        group[1].agent.is_closing = False
        await assert_both_alive(group)


async def test_a_secret_must_be_known_to_both():
    async with cluster(2, options=RpcOptions(secret=b"the right one", gc_freeze=False)) as group:
        await assert_both_alive(group)
        group[0].agent.peer("worker1").connection.abort()
        await group[0].agent.peer("worker1").connection.wait_closed()
        connector = group[0].agent.connector
        connector._options = connector._options.replace(secret=b"a wrong one")
        with pytest.raises(AuthenticationError, match=r"another cluster secret.*ARPC_SECRET"):
            await group[0].rpc_sync("worker1", echo)
        connector._options = connector._options.replace(secret=b"the right one")
        await assert_both_alive(group)


async def test_an_address_nobody_can_use_is_passed_over(monkeypatch):
    async with cluster(2) as group:
        agent = group[0].agent
        resolve = agent.resolve

        async def resolve_with_more(to: Any) -> WorkerRecord:
            record = await resolve(to)
            others = ("carrier-pigeon://roof", "unix:///nowhere/at/all", "memory://nobody")
            return msgspec.structs.replace(record, addresses=(*others, *record.addresses))

        monkeypatch.setattr(agent, "resolve", resolve_with_more)
        await assert_both_alive(group)


async def test_whether_a_worker_is_alive_is_found_out_by_looking():
    async with cluster(2) as group:
        record = await group[0].agent.resolve("worker1")
        connector = group[0].agent.connector
        assert await connector.is_alive(record)
        assert not await connector.is_alive(msgspec.structs.replace(record, incarnation=record.incarnation + 1))
        assert not await connector.is_alive(msgspec.structs.replace(record, addresses=("memory://nobody",)))
        assert not connector._links, "looking opens no connection"
        await assert_both_alive(group)


async def test_an_attempt_that_is_given_up_leaves_nothing():
    async with cluster(2) as group:
        agent = group[0].agent
        attempt = asyncio.create_task(agent.connector.connect(agent.peer("worker1")))
        await asyncio.sleep(0)
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
        assert not agent.connector._attempts
        assert not agent.connector._handshaking
        await assert_both_alive(group)


async def test_an_unknown_transport_is_named():
    async with cluster(1) as group:
        with pytest.raises(WireError, match=r"no transport for 'smoke://signal'; there are memory"):
            await group[0].agent.connector.listen(["smoke://signal"], "host")
