"""The schemas that a connection has announced: which ones it accepts, and their numbers."""

from __future__ import annotations

import pytest
import torch

from arpc.transport import announced_schemas
from arpc.transport.announced_schemas import AnnouncedSchemas
from arpc.wire.values.schemas import Packer, Schema


def used(*shape: int, times: int) -> Schema:
    """Return the schema of a tensor of a shape that was packed so many times."""
    packer = Packer(1 << 16)
    tensor = torch.ones(shape)
    schemas = [packer.pack([tensor]).schema for _ in range(times)]
    assert schemas[-1] is not None
    return schemas[-1]


def test_a_schema_is_accepted_once_it_is_used_again():
    announced = AnnouncedSchemas()
    assert not announced.accepts(used(3, times=1))
    assert announced.accepts(used(3, times=2))


def test_numbers_count_from_one():
    announced = AnnouncedSchemas()
    first, second = used(3, times=2), used(4, times=2)
    assert [announced.add(first), announced.add(second)] == [1, 2]
    assert (announced[first], announced[second]) == (1, 2)


@pytest.mark.parametrize("limit", ["MAX_SCHEMAS", "MAX_SCHEMA_BYTES"])
def test_no_more_is_accepted_than_the_peer_takes(monkeypatch, limit):
    announced = AnnouncedSchemas()
    first, second = used(3, times=2), used(4, times=2)
    monkeypatch.setattr(announced_schemas, limit, 1 if limit == "MAX_SCHEMAS" else len(first.table))
    assert announced.accepts(first)
    announced.add(first)
    assert not announced.accepts(second)
