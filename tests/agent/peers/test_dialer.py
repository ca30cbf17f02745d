"""Calling at addresses: which of them can work."""

from __future__ import annotations

from typing import Any

import msgspec

from arpc.group.membership import WorkerRecord
from arpc.testing import cluster
from tests.agent.leftovers import assert_both_alive


async def test_an_address_nobody_can_use_is_passed_over(monkeypatch):
    async with cluster(2) as group:
        agent = group[0].agent
        resolve = agent.resolve

        async def resolve_with_more(to: Any) -> WorkerRecord:
            record = await resolve(to)
            others = ("carrier-pigeon://roof", "unix:///nowhere/at/all", "memory://nobody")
            return msgspec.structs.replace(record, addresses=(*others, *record.addresses))

        monkeypatch.setattr(agent, "resolve", resolve_with_more)
        await assert_both_alive(group)
