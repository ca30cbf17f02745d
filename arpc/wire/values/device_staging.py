"""Copies of tensors between devices and host memory.

Workers exchange host memory. A `DeviceBackend` copies it from a device and to a device; a `Stager` decides for each
tensor of a message where the tensor belongs at the receiver. Nothing here blocks the event loop: `download` only starts
a copy, and functions that block are returned to the caller, or are for threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["ACCELERATORS", "AcceleratorBackend", "DeviceBackend", "Staged", "Stager"]

ACCELERATORS: Final = ("cuda", "xpu")
"""Device types for which torch has the same interface of streams and events."""


class DeviceBackend(Protocol):
    """Moves bytes between host memory and the devices of one type."""

    def count(self) -> int:
        """Return the number of devices."""

    def download(self, tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Start to copy a strided tensor to host memory. Called on the loop, in the context of the sending code.

        Returns the contiguous copy, and a function that blocks until its bytes are there, for any thread.
        """

    def upload(self, memory: memoryview, device: torch.device) -> Tensor:
        """Copy bytes to a device, as a flat tensor of uint8. Blocks until they are there; for any thread."""

    def adopt(self, tensor: Tensor) -> None:
        """Prepare an uploaded tensor for use. Called on the loop, in the context of the code that uses it."""


class AcceleratorBackend:
    """The devices of one of the `ACCELERATORS`.

    Copies run on streams of their own, so they delay no kernels, and uploads and downloads do not delay each other.
    """

    def __init__(self, device_type: str) -> None:
        self._torch: Any = getattr(torch, device_type)  # torch.cuda: its streams, events and devices
        self._down: dict[torch.device, Any] = {}
        self._up: dict[torch.device, Any] = {}

    def count(self) -> int:
        # not is_available(), which would start the driver, and a process that has done so cannot fork
        return int(self._torch.device_count())

    def download(self, tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
        device = tensor.device
        # on the caller's stream, after the kernels that compute it
        source = tensor.contiguous()
        # pinned: a copy into other memory would block this thread
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        stream = self._stream(self._down, device)
        stream.wait_stream(self._torch.current_stream(device))
        with self._torch.stream(stream):
            host.copy_(source, non_blocking=True)
            copied = self._torch.Event()
            copied.record(stream)
        # torch must not reuse its memory before the copy is done, even if the caller drops it now
        source.record_stream(stream)
        return host, copied.synchronize

    def upload(self, memory: memoryview, device: torch.device) -> Tensor:
        host = torch.frombuffer(memory, dtype=torch.uint8)
        with self._torch.device(device), self._torch.stream(self._stream(self._up, device)):
            # not pinned, so this returns when the bytes are on the device: there is nothing left to wait for
            return host.to(device)

    def adopt(self, tensor: Tensor) -> None:
        # it was allocated for the stream that copied it, and is used on this one
        tensor.record_stream(self._torch.current_stream(tensor.device))

    def _stream(self, streams: dict[torch.device, Any], device: torch.device) -> Any:
        stream = streams.get(device)
        if stream is None:
            stream = streams[device] = self._torch.Stream(device)
        return stream


class Staged(NamedTuple):
    """A tensor to send: its bytes in host memory, once ``wait`` has returned, and the device that they belong on."""

    host: Tensor
    device: str
    """The device's name in the message; empty for host memory."""
    wait: Callable[[], None] | None


class Stager(Protocol):
    """Decides where the tensors of one message belong."""

    moves_host_memory: bool
    """Whether tensors on the CPU may belong on a device, too."""

    def stage(self, tensor: Tensor) -> Staged | None:
        """Start to copy a tensor to host memory; None if it is there and stays there, or has no memory at all.

        Raises `SerializationError` for a tensor that has no place at the receiver.
        """
