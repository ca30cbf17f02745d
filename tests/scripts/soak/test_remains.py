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

    holder = " < list < dict < test_the_holder_of_an_rref_is_named.<locals>.keep"
    begun, forever = asyncio.Event(), asyncio.Event()
    rref = arpc.RRef(1)
    name = repr(rref)
    task = asyncio.create_task(keep({"box": [rref]}, begun, forever))
    del rref
    try:
        await begun.wait()
        # others of this process may be in cycles that nobody has collected yet
        found = [text for text in holders() if text.startswith(name) and holder in text]
    finally:
        forever.set()
        await task
    assert found
    assert not [text for text in holders() if holder in text]
