"""The arguments that are sent, as numpy arrays for the floor and as tensors for the other systems."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

__all__ = ["array_arguments", "bulk_array", "bulk_tensor", "same_content", "tensor_arguments"]

SMALL_FLOATS = 16
DICT_ENTRIES = 50


def array_arguments(payload: str) -> tuple[object, ...]:
    """Return the arguments called `payload`.

    They are ``none``, ``floats16`` (one array), ``dict50`` (a dict of fifty of them) or ``list7`` (a list of any
    number).
    """
    if payload.startswith("list"):
        return ([np.full(SMALL_FLOATS, i, dtype=np.float32) for i in range(int(payload.removeprefix("list")))],)
    match payload:
        case "none":
            return ()
        case "floats16":
            return (np.arange(SMALL_FLOATS, dtype=np.float32),)
        case "dict50":
            return ({f"layer{i}.weight": np.full(SMALL_FLOATS, i, dtype=np.float32) for i in range(DICT_ENTRIES)},)
        case _:
            raise ValueError(f"no payload is called {payload!r}")


def tensor_arguments(payload: str) -> tuple[object, ...]:
    """Return the arguments of a payload, with a tensor for every array."""
    return tuple(_as_tensors(argument) for argument in array_arguments(payload))


@functools.lru_cache(maxsize=1)
def bulk_array(size_bytes: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return one array for each size, written once: its pages are warm, whatever the receiver's are."""
    return np.arange(size_bytes // 4, dtype=np.float32)


def bulk_tensor(size_bytes: int) -> torch.Tensor:
    """Return `bulk_array` as a tensor."""
    import torch  # delayed: the floor's processes do without torch and start faster

    return torch.from_numpy(bulk_array(size_bytes))


def same_content(sent: object, received: object) -> bool:
    """Whether an echo returned what was sent: a benchmark of wrong results is worth nothing."""
    if isinstance(sent, dict) and isinstance(received, dict):
        return sent.keys() == received.keys() and all(same_content(sent[key], received[key]) for key in sent)
    if isinstance(sent, list) and isinstance(received, list):
        return len(sent) == len(received) and all(map(same_content, sent, received))
    if sent is None:
        return received is None
    return bool(np.array_equal(np.asarray(sent), np.asarray(received)))


def _as_tensors(value: object) -> object:
    import torch  # delayed: see bulk_tensor

    if isinstance(value, dict):
        return {key: _as_tensors(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_tensors(item) for item in value]
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value
