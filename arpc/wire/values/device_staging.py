"""How the bytes of a tensor get from a device into host memory, and back.

Between workers travels host memory. A `DeviceBackend` fills it from a device and takes it to one; a `Stager` says, of
each tensor of a message, where it belongs on the other side. Nothing here waits on the loop's behalf: `download` only
starts a copy, and what blocks is handed back, or is for a thread to call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["ACCELERATORS", "AcceleratorBackend", "DeviceBackend", "Staged", "Stager"]

ACCELERATORS: Final = ("cuda", "xpu")
"""Types of devices that torch drives with streams and events, in one and the same way."""


class DeviceBackend(Protocol):
    """Moves bytes between host memory and the devices of one type."""

    def count(self) -> int:
        """How many devices there are."""

    def download(self, tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Begin to copy a strided tensor to host memory. Called on the loop, in the context of whoever sends.

        The contiguous copy, and what returns once its bytes are there: that blocks, and is for any thread.
        """

    def upload(self, memory: memoryview, device: torch.device) -> Tensor:
        """The bytes on a device, as a flat tensor of uint8. Blocks until they are there; for any thread."""

    def adopt(self, tensor: Tensor) -> None:
        """What was uploaded is about to be used. Called on the loop, in the context of whoever uses it."""


class AcceleratorBackend:
    """The devices of one of the `ACCELERATORS`.

    Copies run on streams of their own, so they delay no kernel, and no copy waits for another direction's.
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
        # on the caller's stream, behind whatever computes it
        source = tensor.contiguous()
        # pinned: into other memory the driver would copy while this thread waits
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        stream = self._stream(self._down, device)
        stream.wait_stream(self._torch.current_stream(device))
        with self._torch.stream(stream):
            host.copy_(source, non_blocking=True)
            copied = self._torch.Event()
            copied.record(stream)
        # its memory is not for others before the copy is done, even if the caller drops it now
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
    """A tensor on its way out: its bytes in host memory, once ``wait`` has returned, and where they belong."""

    host: Tensor
    device: str
    """Empty: in host memory."""
    wait: Callable[[], None] | None


class Stager(Protocol):
    """Knows where the tensors of one message belong."""

    moves_host_memory: bool
    """Tensors on the CPU may have to go elsewhere, too."""

    def stage(self, tensor: Tensor) -> Staged | None:
        """Begin to bring a tensor into host memory; None if it is there and stays there, or has no memory at all.

        Raises `SerializationError` for one that has no place on the other side.
        """
