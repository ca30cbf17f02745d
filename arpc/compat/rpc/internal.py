"""Names that scripts and tools take from torch.distributed.rpc.internal."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from enum import Enum
from io import BytesIO
from typing import Any, NamedTuple

import torch

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]


class RPCExecMode(Enum):
    """The kind of a call; part of its name in profiles."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A function and its arguments."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class RemoteException(NamedTuple):
    """An exception as text, and its type."""

    msg: str
    exception_type: type


class _Pickler(pickle.Pickler):
    """Puts tensors into a table, and uses the registered reducers of other classes."""

    def __init__(self, file: BytesIO, reducers: dict[type, Callable[[Any], Any]]) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._reducers = reducers

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not torch.Tensor:
            return None
        self.tensors.append(obj)
        return len(self.tensors) - 1

    def reducer_override(self, obj: Any) -> Any:
        reducer = self._reducers.get(type(obj))
        return NotImplemented if reducer is None else reducer(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


class _InternalRPCPickler:
    """Serializes objects as bytes and a table of tensors, for programs that do so by hand. Calls do not use it."""

    def __init__(self) -> None:
        self._reducers: dict[type, Callable[[Any], Any]] = {}

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], Any]) -> None:
        """Register a reducer for a class. The first one that is registered counts."""
        self._reducers.setdefault(obj_class, reducer)

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        """Return the object as bytes, and the tensors that were found in it."""
        file = BytesIO()
        pickler = _Pickler(file, self._reducers)
        pickler.dump(obj)
        return file.getvalue(), pickler.tensors

    def deserialize(self, binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
        """Return the object that was serialized."""
        return _Unpickler(BytesIO(binary_data), tensor_table).load()


_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Return the object as bytes, and the tensors that were found in it."""
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
    """Return the object that was serialized."""
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """Return the name of a call in a profile."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"
