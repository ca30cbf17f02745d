"""torch's classes of options, and their conversion to `RpcOptions`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch

from arpc.compat.rpc.constants import DEFAULT_INIT_METHOD, DEFAULT_NUM_WORKER_THREADS, DEFAULT_RPC_TIMEOUT_SEC
from arpc.devices import checked_device_map, merged_device_map
from arpc.errors import ConfigurationError
from arpc.options import RpcOptions

__all__ = ["TensorPipeRpcBackendOptions"]

DeviceType = int | str | torch.device


class RpcBackendOptions:
    """The options of every backend: where the group meets, and how long calls may take."""

    def __init__(self, rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC, init_method: str = DEFAULT_INIT_METHOD) -> None:
        if isinstance(rpc_timeout, timedelta) or not isinstance(rpc_timeout, int | float):
            raise TypeError(
                f"{type(self).__name__}(): incompatible constructor arguments: rpc_timeout is a number of seconds, "
                f"not {type(rpc_timeout).__name__}"
            )
        self.rpc_timeout = float(rpc_timeout)
        self.init_method = init_method


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """The options of the default backend.

    ``num_worker_threads`` run the plain functions that other workers call here. arpc itself chooses transports and
    channels: ``_transports`` and ``_channels`` are accepted and have no effect.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: dict[str, dict[DeviceType, DeviceType]] | None = None,
        devices: Sequence[DeviceType] | None = None,
        _transports: list[str] | None = None,
        _channels: list[str] | None = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        if not isinstance(num_worker_threads, int) or num_worker_threads < 1:
            raise TypeError(
                f"{type(self).__name__}(): incompatible constructor arguments: num_worker_threads is a number, "
                f"1 or more, not {num_worker_threads!r}"
            )
        self.num_worker_threads = num_worker_threads
        self.device_maps: dict[str, dict[torch.device, torch.device]] = {}
        for to, device_map in (device_maps or {}).items():
            self.set_device_map(to, device_map)
        self.devices: list[torch.device] = []
        self.set_devices(devices or [])

    def set_device_map(self, to: str, device_map: dict[DeviceType, DeviceType]) -> None:
        """Map devices of this worker to those of worker ``to`` for tensors that are sent. Adds to earlier mappings."""
        try:
            checked = checked_device_map(to, device_map)
            merged = merged_device_map(to, self.device_maps.get(to, {}), dict(checked.items()))
            self.device_maps[to] = dict(merged)
        except ConfigurationError as error:
            raise ValueError(f"`device_map` only supports 1-to-1 mapping: {error}") from error

    def set_devices(self, devices: Sequence[DeviceType]) -> None:
        """Set the GPUs that may be used here."""
        found = [torch.device(device) for device in devices]
        for device in found:
            if device.type != "cuda":
                raise ValueError(f"`set_devices` expect a list of CUDA devices, but got device type {device.type}.")
        self.devices = found

    def as_arpc(self) -> RpcOptions:
        """Return these options as `RpcOptions`."""
        return RpcOptions(
            rpc_timeout=self.rpc_timeout,
            timeouts_travel=False,
            gc_freeze=False,  # garbage collection is left to the script
            gc_backoff=1,
            num_worker_threads=self.num_worker_threads,
            device_maps=self.device_maps,  # type: ignore[arg-type]  # invariant keys
            devices=tuple(self.devices),
        )
