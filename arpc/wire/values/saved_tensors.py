"""Tensors in the bytes of torch.save: those of layouts that hide their memory (quantized, nested)."""

from __future__ import annotations

import io
import zipfile
from typing import Any, Final

import torch
from torch import Tensor

from arpc.errors import ProtocolError
from arpc.private.torch import nested_places, rebuild_nested
from arpc.wire.values.bounds import check_strided

__all__ = ["load_saved"]

_SPARSE: Final = frozenset((torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc))


def load_saved(memory: memoryview) -> Tensor:
    """The tensor that was saved. Raises `ProtocolError` for anything else, and whatever torch.load raises.

    Torch.load, as it is called here, runs no code of the peer's, but it believes what it reads. So the file must not be
    compressed, which bounds what is read by what came, and a nested tensor must lie in its own memory.
    """
    # a copy, so nothing changes after it was checked
    file = io.BytesIO(memory)
    _check_archive(file, memory.nbytes)
    loaded = _load(file)
    if type(loaded) is not Tensor:
        raise ProtocolError(f"a tensor was announced, and it is of type {type(loaded).__name__}")
    if loaded.layout in _SPARSE:
        raise ProtocolError(f"a tensor of layout {loaded.layout} that was saved")  # its indices were not checked
    if loaded.is_nested:
        _check_nested(loaded)
    return loaded


def _load(file: io.BytesIO) -> object:
    rebuild: Any = rebuild_nested()
    # torch 2.15 no longer takes it for safe, because it trusts the sizes that it reads: these are checked afterwards
    if rebuild in torch.serialization.get_safe_globals():
        return torch.load(file, weights_only=True)
    with torch.serialization.safe_globals([rebuild]):
        return torch.load(file, weights_only=True)


def _check_archive(file: io.BytesIO, size_bytes: int) -> None:
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    is_compressed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
    if is_compressed or sum([member.file_size for member in members]) > size_bytes:
        raise ProtocolError("a tensor was saved in a way that takes more memory than came")
    file.seek(0)


def _check_nested(tensor: Tensor) -> None:
    """Torch's operators take for granted that each of the tensors lies in the memory of all."""
    memory = tensor.values()
    item_bytes = memory.dtype.itemsize
    for shape, strides, offset in zip(*nested_places(tensor), strict=True):
        check_strided(shape, strides, item_bytes, memory.nbytes, offset * item_bytes)
