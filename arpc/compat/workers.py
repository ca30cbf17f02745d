"""WorkerInfo as torch has it: the same, but checked when it is made by hand."""

from __future__ import annotations

from typing import Self

from arpc import ids
from arpc.errors import ConfigurationError

__all__ = ["WorkerInfo"]


class WorkerInfo(ids.WorkerInfo):
    """Who a worker is."""

    __slots__ = ()

    def __new__(cls, name: str, id: int) -> Self:  # noqa: A002 - torch's name
        try:
            ids.check_worker_name(name)
        except ConfigurationError as error:
            raise RuntimeError(str(error)) from error
        return super().__new__(cls, name, id)

    @classmethod
    def of(cls, info: ids.WorkerInfo) -> Self:
        """One that arpc has made."""
        return cls._make(info)
