"""Calling at addresses: which of them can work."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from arpc.errors import WireError
from arpc.group.membership import WorkerRecord
from arpc.testing import cluster
from arpc.wire.handshake import Role
from tests.agent.leftovers import assert_both_alive


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


class MadeTooLate:
    """A transport whose connection is there in the very moment when the attempt is given up."""

    is_open = False

    def __init__(self) -> None:
        self.attempt: asyncio.Task[Any] | None = None
        self.aborted: list[Exception | None] = []

    async def connect(self, *_: Any) -> Any:
        assert self.attempt is not None
        asyncio.get_running_loop().call_soon(self.attempt.cancel)
        return self

    def abort(self, error: Exception | None = None) -> None:
        self.aborted.append(error)


async def test_a_connection_that_is_made_as_the_attempt_is_given_up_is_closed():
    async with cluster(1) as group:
        dialer = group[0].agent.connector.dialer
        transport = MadeTooLate()
        dialer.transports["late"] = transport  # type: ignore[assignment]
        attempt = asyncio.create_task(dialer.open("late://nobody", dialer.protocol(Role.CONNECTOR)))
        transport.attempt = attempt
        with pytest.raises(asyncio.CancelledError):
            await attempt
        del dialer.transports["late"]
        assert [str(error) for error in transport.aborted] == ["the attempt was given up"]


async def test_an_attempt_of_this_worker_that_is_given_up_is_no_connection_from_another():
    async with cluster(2) as group:
        record = await group[0].agent.resolve("worker1")
        connector, dialer = group[0].agent.connector, group[0].agent.connector.dialer
        (address,) = record.addresses
        connection = await dialer.transport(address).connect(address, dialer.protocol(Role.CONNECTOR), connector)
        connection.abort(WireError("the attempt was given up"))
        await connection.wait_closed()
        assert connector.refused == 0
        await assert_both_alive(group)
