"""The order in which workers leave a store that one of them hosts: it ends with that process, which goes last."""

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
"""Numbers the groups of this process. All workers of a group have the same number for it."""


class Goodbye:
    """The last step of a worker in a group of fixed size."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        self._store = store if isinstance(store, TCPStore) else None
        self._is_host = rank == 0
        self._world_size = world_size
        self._key = f"arpc.compat/left/{next(_numbers)}"

    def say(self) -> None:
        """Notify the host that this worker no longer needs the store. The host waits a while for the others."""
        store, self._store = self._store, None
        if store is None:
            return
        with contextlib.suppress(RuntimeError):  # the host is gone already
            left = store.add(self._key, 1)
            end = time.monotonic() + _PATIENCE_S
            while self._is_host and left < self._world_size and time.monotonic() < end:
                time.sleep(_PAUSE_S)
                left = store.add(self._key, 0)
