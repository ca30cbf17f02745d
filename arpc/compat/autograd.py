"""Distributed autograd with torch's names."""

from __future__ import annotations

__all__ = ["is_available"]


def is_available() -> bool:
    return True


def _init(worker_id: int) -> None:
    """A worker of arpc brings distributed autograd with it."""


def _get_debug_info() -> dict[str, str]:
    return {"num_current_backward_passes": "0", "num_autograd_contexts": "0"}
