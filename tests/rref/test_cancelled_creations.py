"""Creations that are cancelled before they begin: many of them, and their cancellations, may come in one read."""

from __future__ import annotations

import asyncio

import pytest

import arpc
from arpc.testing import cluster
from tests.agent.leftovers import until

made: list[str] = []


class Thing:
    def __init__(self) -> None:
        made.append("thing")


async def make() -> str:
    made.append("made")
    return "made"


@pytest.fixture(autouse=True)
def nothing_made():
    made.clear()


@pytest.mark.parametrize("function", [Thing, make, list])
async def test_nothing_is_left_of_a_creation_that_is_cancelled_before_its_first_step(function):
    options = arpc.RpcOptions(rref_grace=0.2, control_backoff=0.02)
    async with cluster(2, options=options) as group:
        creator, owner = group
        await creator.rpc_sync("worker1", make)
        await creator.remote("worker1", function).to_here()  # so that the next goes by the number of its function
        made.clear()
        owner.agent.dispatcher.tasks.idle.clear()  # so that it gets a task, whose first step is in the next turn
        connection = creator.agent.known_peer("worker1").connection
        connection.send = connection._send_later  # so that the request is not gone already when it is cancelled
        rref = creator.remote("worker1", function)
        created = rref._get_future()
        created.cancel()
        with pytest.raises((asyncio.CancelledError, arpc.RRefError)):
            await created
        await creator.rpc_sync("worker1", make)
        del rref, created
        await until(lambda: not owner.rref_context.forks.owned, lambda: owner.rref_context.forks.owned)
        await until(lambda: not creator.rref_context.forks.users, lambda: creator.rref_context.forks.users)
