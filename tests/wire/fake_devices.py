"""A device that is none: tensors of torch's ``meta`` have no bytes, so their bytes are kept here."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor, UntypedStorage

__all__ = ["FakeDevice"]


class FakeDevice:
    """Stands in for a backend. The device ``meta`` of each worker that has it; what is done, and where, is noted."""

    def __init__(self, devices: int = 1) -> None:
        self.devices = devices
        self.log: list[str] = []
        self.threads: set[int] = set()
        """Those that have waited or uploaded."""
        self.failure: Exception | None = None
        """What uploads and downloads end with."""
        self.gate = threading.Event()
        """Downloads end when it is open."""
        self.gate.set()
        self._bytes: dict[int, tuple[UntypedStorage, Tensor]] = {}

    def put(self, tensor: Tensor) -> Tensor:
        """The same tensor on the device."""
        made = tensor.to("meta")
        return self._keep(made, tensor.contiguous().view(-1).view(torch.uint8).clone())

    def get(self, tensor: Tensor) -> Tensor:
        """What a tensor of the device would hold."""
        assert tensor.is_meta
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        _, held = self._bytes[tensor.untyped_storage()._cdata]
        return held.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _keep(self, made: Tensor, held: Tensor) -> Tensor:
        storage = made.untyped_storage()
        self._bytes[storage._cdata] = storage, held
        return made

    # -- a DeviceBackend

    def count(self) -> int:
        return self.devices

    def download(self, tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
        self.log.append("download")
        content = self.get(tensor).contiguous()
        host = torch.empty(content.shape, dtype=content.dtype)

        def wait() -> None:
            self.threads.add(threading.get_ident())
            assert self.gate.wait(40)
            if self.failure is not None:
                raise self.failure
            host.copy_(content)

        return host, wait

    def upload(self, memory: memoryview, device: torch.device) -> Tensor:
        assert device == torch.device("meta")
        self.log.append("upload")
        self.threads.add(threading.get_ident())
        if self.failure is not None:
            raise self.failure
        held = torch.frombuffer(bytearray(memory), dtype=torch.uint8)
        return self._keep(torch.empty(held.shape, dtype=torch.uint8, device=device), held)

    def adopt(self, tensor: Tensor) -> None:
        assert tensor.is_meta
        self.log.append("adopt")
