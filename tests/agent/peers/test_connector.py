"""Connections: what is listened on, and who is found there."""

from __future__ import annotations

import msgspec
import pytest

from arpc.errors import WireError
from arpc.testing import cluster
from tests.agent.leftovers import assert_both_alive


async def test_whether_a_worker_is_alive_is_found_out_by_looking():
    async with cluster(2) as group:
        record = await group[0].agent.resolve("worker1")
        connector = group[0].agent.connector
        assert await connector.dialer.is_alive(record)
        assert not await connector.dialer.is_alive(msgspec.structs.replace(record, incarnation=record.incarnation + 1))
        assert not await connector.dialer.is_alive(msgspec.structs.replace(record, addresses=("memory://nobody",)))
        assert not connector._links, "looking opens no connection"
        await assert_both_alive(group)


async def test_an_unknown_transport_is_named():
    async with cluster(1) as group:
        with pytest.raises(WireError, match=r"no transport for 'smoke://signal'; there are memory"):
            await group[0].agent.connector.listen(["smoke://signal"], "host")
