"""Training over processes."""

from __future__ import annotations

import asyncio

import torch

from tests.integration import functions
from tests.integration.processes import Processes
from tests.optim.digits import train_here, train_there


async def test_a_model_over_processes_learns_as_in_one(processes: Processes):
    expected, weights = await asyncio.to_thread(train_here, 3, torch.optim.SGD, 0.1)
    async with processes.group("a", "b", main=functions.serve):
        losses, remote_weights = await train_there(["a", "b", "test"], 3, torch.optim.SGD, 0.1)
    # their torch may use another number of threads, and add in another order
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
    torch.testing.assert_close(remote_weights, weights)
