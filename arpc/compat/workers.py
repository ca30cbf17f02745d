"""WorkerInfo as in torch: arpc's own, but checked when it is made by hand."""

from __future__ import annotations

from typing import Self

from arpc import ids
from arpc.errors import ConfigurationError

__all__ = ["WorkerInfo"]


class WorkerInfo(ids.WorkerInfo):
    """The name and id of a worker."""

    __slots__ = ()

    def __new__(cls, name: str, id: int) -> Self:  # noqa: A002 - torch's name
        try:
            ids.check_worker_name(name)
        except ConfigurationError as error:
            raise RuntimeError(str(error)) from error
        return super().__new__(cls, name, id)

    @classmethod
    def of(cls, info: ids.WorkerInfo) -> Self:
        """Convert a WorkerInfo of arpc, without checks."""
        return cls._make(info)
