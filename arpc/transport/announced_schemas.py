"""The schemas that a connection has announced to its peer, by number, within the limits that the peer sets."""

from __future__ import annotations

from typing import Final

from arpc.wire.protocol import MAX_SCHEMA_BYTES, MAX_SCHEMAS
from arpc.wire.values.schemas import Schema

__all__ = ["AnnouncedSchemas"]

_USES_TO_ANNOUNCE: Final = 2


class AnnouncedSchemas(dict[Schema, int]):
    """Schemas and their numbers, which count from 1."""

    def __init__(self) -> None:
        super().__init__()
        self._size_bytes = 0

    def accepts(self, schema: Schema) -> bool:
        """Whether a schema is used again and again, and the peer takes one more."""
        return (
            schema.uses >= _USES_TO_ANNOUNCE
            and len(self) < MAX_SCHEMAS
            and self._size_bytes + len(schema.table) <= MAX_SCHEMA_BYTES
        )

    def add(self, schema: Schema) -> int:
        """Return the number of a schema that was announced."""
        self._size_bytes += len(schema.table)
        number = self[schema] = len(self) + 1
        return number
