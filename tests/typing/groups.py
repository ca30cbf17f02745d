# pyright: strict, reportUnnecessaryTypeIgnoreComment=true, reportUnusedFunction=false, reportPrivateUsage=false
"""What a type checker knows of groups, launches and futures. Never run: `test_typing` has mypy and pyright read it."""

from __future__ import annotations

from typing import assert_type

import torch
from torch.nn import Parameter

import arpc
from arpc.testing import cluster


async def train(steps: int) -> float:
    return steps / 2


def count(steps: int) -> int:
    return steps


async def members() -> None:
    async with arpc.init_rpc() as worker:
        assert_type(worker, arpc.Worker)
        assert_type(worker.get_worker_infos(), list[arpc.WorkerInfo])
    async with cluster(3) as group:
        assert_type(group[0], arpc.Worker)
        assert_type(group["worker1"], arpc.Worker)
        assert_type(group[1:], list[arpc.Worker])


async def launches() -> None:
    assert_type((await arpc.launch.local(train, (3,), workers=2)).values, dict[str, float])
    assert_type((await arpc.launch.local(count, (3,), workers={"ps": 1})).values, dict[str, int])
    assert_type((await arpc.launch.local("train.py", workers=2)).values, dict[str, None])
    assert_type(arpc.run(train(3)), float)


async def several_futures(futures: list[arpc.Future[int]]) -> None:
    assert_type(await arpc.futures.wait_all(futures), list[int])
    assert_type(await arpc.futures.collect_all(futures), list[arpc.Future[int]])


def optimizers(parameters: list[arpc.RRef[Parameter]]) -> None:
    arpc.optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)


def what_is_wrong(numbers: list[arpc.RRef[int]]) -> None:
    arpc.optim.DistributedOptimizer(torch.optim.SGD, numbers, lr=0.1)  # type: ignore[arg-type]
