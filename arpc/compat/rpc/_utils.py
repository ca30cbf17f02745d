"""Functions of torch.distributed.rpc._utils, for programs that change the membership of a group by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from arpc.compat.workers import WorkerInfo

__all__: list[str] = []

_LOCK = "arpc.compat/membership"


@contextmanager
def _group_membership_management(store: Store, name: str, is_join: bool) -> Iterator[None]:
    """Keep other workers that use this function from joining or leaving meanwhile.

    Raises the store's own error if they take longer than its timeout.
    """
    mine = f"{name} {'joins' if is_join else 'leaves'}"
    while (holder := store.compare_set(_LOCK, "", mine).decode()) != mine:
        store.wait([f"{_LOCK}/{holder}"])
    try:
        yield
    finally:
        store.set(_LOCK, "")
        store.set(f"{_LOCK}/{mine}", "done")


def _update_group_membership(
    worker_info: WorkerInfo,
    my_devices: Sequence[Any],
    reverse_device_map: Mapping[str, Mapping[Any, Any]],
    is_join: bool,
) -> None:
    """Do nothing: workers of arpc read joins and leaves from the store, and get the rest from handshakes."""
