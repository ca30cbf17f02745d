"""Who may come in, and who may not."""

from __future__ import annotations

import pytest

from arpc.errors import AuthenticationError, WorkerLostError
from arpc.options import RpcOptions
from arpc.testing import cluster
from tests.agent.leftovers import assert_both_alive
from tests.agent.stage import echo


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
        dialler = group[0].agent.connector.dialler
        dialler.options = dialler.options.replace(secret=b"a wrong one")
        with pytest.raises(AuthenticationError, match=r"another cluster secret.*ARPC_SECRET"):
            await group[0].rpc_sync("worker1", echo)
        dialler.options = dialler.options.replace(secret=b"the right one")
        await assert_both_alive(group)
