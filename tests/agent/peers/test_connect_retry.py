"""Attempts to connect: which worker is found at an address, and what becomes of attempts that fail."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from arpc.errors import WorkerLostError
from arpc.group.membership import WorkerRecord
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


async def test_an_attempt_that_is_given_up_leaves_nothing():
    async with cluster(2) as group:
        agent = group[0].agent
        attempt = asyncio.create_task(agent.connector.connect(agent.peer("worker1")))
        await asyncio.sleep(0)
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
        assert not agent.connector.links
        await assert_both_alive(group)
