"""The clock that tells how much of a pass is torch's own engine."""

from __future__ import annotations

import pytest

import arpc
from arpc.autograd.engine.run_policy import SHORT_NODES
from arpc.bench.gradients import deepen, leaves, timed_engine
from arpc.testing import cluster


@pytest.mark.parametrize("nodes", [10, 2 * SHORT_NODES], ids=["small", "large"])
async def test_every_way_to_run_a_graph_is_timed(nodes):
    x, _ = leaves()
    async with cluster(1):
        with timed_engine() as clock:
            async with arpc.autograd.context() as ctx_id:
                await arpc.autograd.backward(ctx_id, [deepen(x, nodes).sum()])
        assert clock.seconds > 0
        counted = clock.seconds
        async with arpc.autograd.context() as ctx_id:
            await arpc.autograd.backward(ctx_id, [deepen(x, nodes).sum()])
        assert clock.seconds == counted
