"""What a step of an optimizer costs: one message to each owner, and no import."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import arpc
from arpc.optim import DistributedOptimizer
from arpc.testing import FaultyTransport, cluster
from arpc.transport.in_process import MemoryNetwork
from arpc.wire.messages import MessageType
from tests.optim.parameters import make_parameter
from tests.rref.conftest import OPTIONS

_ANSWERS = {MessageType.REPLY, MessageType.FAILURE}


@pytest.mark.parametrize("parameters", [1, 40])
async def test_a_step_takes_one_message_to_each_owner(quick_collections, parameters):
    transport = FaultyTransport(MemoryNetwork())
    async with cluster(3, options=OPTIONS, transports={"memory": transport}):
        rrefs = [
            arpc.remote(owner, make_parameter, (torch.ones(2),))
            for owner in ("worker1", "worker2")
            for _ in range(parameters)
        ]
        opt = await DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1)
        for _ in range(3):
            async with arpc.autograd.context() as ctx_id:
                values = [await rref.to_here() for rref in rrefs]
                await arpc.autograd.backward(ctx_id, [sum(value.sum() for value in values)])
                before = dict(transport.seen)
                await opt.step(ctx_id)
                sent = {
                    kind: count - before.get(kind, 0)
                    for kind, count in transport.seen.items()
                    if kind not in _ANSWERS and count != before.get(kind, 0)
                }
        assert sum(sent.values()) == 2, sent
        del rrefs, opt, values


_PROGRAM = """
import asyncio, sys, torch, arpc
from arpc.testing import cluster

async def main():
    async with cluster(1):
        rref = arpc.remote("worker0", torch.nn.Parameter, (torch.ones(2),))
        assert "torch._dynamo" not in sys.modules
        opt = await arpc.optim.DistributedOptimizer(torch.optim.SGD, [rref], lr=0.1)
        before = set(sys.modules)
        async with arpc.autograd.context() as ctx_id:
            await arpc.autograd.backward(ctx_id, [(await rref.to_here()).sum()])
            await opt.step(ctx_id)
        print(sorted(name for name in set(sys.modules) - before if "dynamo" in name))

arpc.run(main())
"""


def test_no_step_imports_the_compiler_of_torch():
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120, check=False, env=dict(os.environ)
    )
    assert done.stdout.strip() == "[]", done.stderr
