from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import arpc
from arpc.testing import Cluster, cluster
from scripts.soak.remains import holders


@pytest.fixture
async def group() -> AsyncIterator[Cluster]:
    async with cluster(1) as made:
        yield made


@pytest.mark.usefixtures("group")
async def test_the_holder_of_an_rref_is_named():
    async def keep(box: dict[str, list[arpc.RRef[int]]], begun: asyncio.Event, forever: asyncio.Event) -> None:
        begun.set()
        await forever.wait()
        box.clear()

    begun, forever = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(keep({"box": [arpc.RRef(1)]}, begun, forever))
    await begun.wait()
    found = list(holders())
    assert found
    for text in found:
        assert " < list < dict < test_the_holder_of_an_rref_is_named.<locals>.keep" in text
    forever.set()
    await task
    assert list(holders()) == []
