"""Leaving a store that one of the workers hosts: it ends with that process, so the others go first."""

from __future__ import annotations

import contextlib
import time
from itertools import count
from typing import Final

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

__all__ = ["Goodbye"]

_PATIENCE_S: Final = 5.0
_PAUSE_S: Final = 0.005
_numbers = count()
"""Groups of this process, one after the other. All of a group are in the same one."""


class Goodbye:
    """What a worker of a group of fixed size does last."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        self._store = store if isinstance(store, TCPStore) else None
        self._is_host = rank == 0
        self._world_size = world_size
        self._key = f"arpc.compat/left/{next(_numbers)}"

    def say(self) -> None:
        """Tell the host that this worker needs the store no more; the host waits for all others, though not long."""
        store, self._store = self._store, None
        if store is None:
            return
        with contextlib.suppress(RuntimeError):  # the host is gone: then there is nobody to wait
            left = store.add(self._key, 1)
            end = time.monotonic() + _PATIENCE_S
            while self._is_host and left < self._world_size and time.monotonic() < end:
                time.sleep(_PAUSE_S)
                left = store.add(self._key, 0)
