"""Each operation, without any fault: it ends, its calls are logged, and nothing is left of it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

import arpc
import arpc.testing
from scripts.soak.ledger import Ledger
from scripts.soak.operations import FAMILIES
from scripts.soak.operations.base import Client, Operation, set_client
from scripts.soak.operations.rrefs import create_for
from scripts.soak.records import read_records
from scripts.soak.remains import EMPTY_TABLES, remains, table

OPERATIONS = [operation for operations in FAMILIES.values() for operation in operations]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
async def test_an_operation_keeps_all_promises(tmp_path: Path, operation: Operation):
    client = Client(Ledger(tmp_path, "worker0", 1), operation.name)
    set_client(client)
    async with arpc.testing.cluster(4) as workers:
        client.others = {worker.name for worker in workers[1:]}
        for _ in range(12 if operation.name.startswith("hostile") else 4):  # there are several hostile errors
            with suppress(*([arpc.CallError] if operation.name in {"call-cancelled", "call-short"} else [])):
                await operation.run(client)
        for child in list(client.children):
            await child
    records = read_records(tmp_path)
    assert len(records.calls) >= 4
    assert records.complaints(set()) == []


async def test_a_creation_that_a_worker_refuses_to_begin_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    client = Client(Ledger(tmp_path, "worker0", 1), "creation")
    set_client(client)
    async with arpc.testing.cluster(2) as workers:
        worker = workers[0]
    monkeypatch.setattr(Client, "worker", worker)
    with pytest.raises(arpc.ShutdownError):
        await create_for("token", "worker1")
    assert [text for text in read_records(tmp_path).complaints(set()) if "has no end" in text] == []


def test_every_operation_has_a_name_of_its_own():
    names = [operation.name for operation in OPERATIONS]
    assert len(set(names)) == len(names)


async def test_a_worker_has_every_table_that_must_be_empty():
    async with arpc.testing.cluster(2) as workers:
        assert {path: list(table(workers[0], path)) for path in EMPTY_TABLES} == {path: [] for path in EMPTY_TABLES}
        assert (await remains())["left"] == {}


async def test_what_a_worker_holds_is_told_by_the_name_of_its_table():
    async with arpc.testing.cluster(2):
        held = arpc.remote("worker1", make_list)
        waiting = asyncio.ensure_future(arpc.rpc_sync("worker1", asyncio.sleep, args=(60,)))
        await held.to_here()
        left = (await remains())["left"]
        on_owner = (await arpc.rpc_sync("worker1", remains))["left"]
        waiting.cancel()
        await asyncio.wait([waiting])
        await held.release()
    assert {"rref_context.forks.users", "rrefs", "calls_in_flight"} <= set(left)
    assert {"rref_context.forks.owned", "rrefs", "requests"} <= set(on_owner)


def make_list() -> list[int]:
    return [1, 2, 3]
