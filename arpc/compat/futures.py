"""A replacement for torch's `wait_all`, which overlooks errors that Python has set."""

from __future__ import annotations

import threading
from typing import Any

import torch

__all__ = ["wait_all"]


def wait_all(futures: list[torch.futures.Future[Any]]) -> list[Any]:
    """Return the values of all futures. Raises the first error as soon as it happens, whatever the others do.

    torch's own function waits for all of them: it takes an error that was set from Python for a value.
    """
    waited = list(futures)
    lock = threading.Lock()
    is_over = threading.Event()
    errors: list[BaseException] = []
    left = len(waited)

    def one_done(future: torch.futures.Future[Any]) -> None:
        nonlocal left
        error: BaseException | None = None
        try:
            future.value()
        except Exception as raised:  # noqa: BLE001 - raised where the futures are awaited
            error = raised
        with lock:
            left -= 1
            if error is not None:
                errors.append(error)
            if error is not None or not left:
                is_over.set()

    for future in waited:
        future.add_done_callback(one_done)
    if waited:
        is_over.wait()
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # an error refers to this frame
    return [future.value() for future in waited]
