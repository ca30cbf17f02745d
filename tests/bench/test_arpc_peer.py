"""Measurements of arpc that go to several workers or have several parts, between workers of one process."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from arpc.bench.arpc_peer import ArpcCaller
from arpc.bench.systems import callee_name
from arpc.testing import cluster


@pytest.fixture
async def caller() -> AsyncIterator[ArpcCaller]:
    async with cluster(["caller", *map(callee_name, range(3))]):
        yield ArpcCaller()


@pytest.mark.parametrize("step", ["5 in a row", "5 side by side"])
async def test_a_step_goes_to_three_workers(caller: ArpcCaller, step: str) -> None:
    name = f"autograd on three workers/{step}"
    assert (await caller.shape(name=name, flavour="async", budget_s=0.01))["p50_us"] > 0
    assert (await caller.shape_rate(name=name, flavour="async", in_flight=4, budget_s=0.01))["calls_per_s"] > 0


async def test_growth_is_what_each_further_one_adds(caller: ArpcCaller, monkeypatch: pytest.MonkeyPatch) -> None:
    async def shape(*, name: str, flavour: str, budget_s: float) -> dict[str, float]:
        return {"p50_us": {"one": 20.0, "ten": 65.0}[name]}

    monkeypatch.setattr(caller, "shape", shape)
    assert await caller.growth(few="one", many="ten", more=9, budget_s=0.01) == {"each_us": 5.0}


async def test_the_transformer_tells_the_share_of_arithmetic(caller: ArpcCaller) -> None:
    figures = await caller.autograd_transformer(budget_s=0.01)
    assert figures["p50_us"] > 0
    assert figures["arithmetic"] > 0
