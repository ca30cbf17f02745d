"""The file descriptors of the process that runs the tests."""

from __future__ import annotations

import gc
from pathlib import Path


def open_descriptors() -> set[str]:
    """Name each open descriptor, once those that only garbage holds are closed.

    Many tests share the process. Without the collection, descriptors that an earlier test left in a reference cycle
    would be closed at any time, between two calls of this function as well.
    """
    gc.collect()
    return {path.name for path in Path("/proc/self/fd").iterdir()}
