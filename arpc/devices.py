"""Device maps: from the devices of one worker to those of another, for tensors that are not in host memory.

A map of worker *a* for worker *b*, such as ``{"cuda:0": "cuda:1"}``, places the arguments that *a* sends; its inverse
places the results that *a* receives. So it must be one to one. Each worker announces its devices and maps to the group,
and every worker checks them all, so that an invalid map fails at the start and on every worker alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

import msgspec
import torch

from arpc.errors import ConfigurationError

__all__ = [
    "DeviceClaims",
    "DeviceLike",
    "DeviceMap",
    "check_device_maps",
    "checked_device",
    "checked_device_map",
    "checked_devices",
    "merged_device_map",
]

DeviceLike: TypeAlias = int | str | torch.device
"""``0``, ``"cuda:0"`` and ``torch.device("cuda", 0)`` are the same device."""

DeviceMap: TypeAlias = Mapping[torch.device, torch.device]

_CPU: Final = torch.device("cpu")
_WITHOUT_INDEX: Final = ("cpu", "meta")
"""Types with a single device, whatever its index."""


class DeviceClaims(msgspec.Struct, frozen=True):
    """The devices that a worker announces: how many it has of each type, which it uses, and its maps by peer."""

    counts: dict[str, int] = {}
    devices: tuple[str, ...] = ()
    maps: dict[str, dict[str, str]] = {}


def checked_device(value: DeviceLike, what: str) -> torch.device:
    """Return the device for any of its names. Raises `ConfigurationError`, whose text begins with ``what``."""
    if isinstance(value, bool) or not isinstance(value, int | str | torch.device):
        raise ConfigurationError(f"{what}: a device is a number, a name like 'cuda:0' or a torch.device, not {value!r}")
    try:
        # not torch.device(0): it means the accelerator of this host, and the peer may have another
        device = torch.device("cuda", value) if isinstance(value, int) else torch.device(value)
    except RuntimeError as error:
        raise ConfigurationError(f"{what}: {value!r} is not a device: {str(error).splitlines()[0]}") from None
    if device.type in _WITHOUT_INDEX:
        return torch.device(device.type)
    # without an index, the device would be the current one of whichever thread uses it
    return device if device.index is not None else torch.device(device.type, 0)


def checked_device_map(to: str, mapping: Mapping[DeviceLike, DeviceLike]) -> dict[torch.device, torch.device]:
    """Check a device map from the user, as far as one worker can, and return it. Raises `ConfigurationError`."""
    what = f"the device map for worker {to!r}"
    if not isinstance(mapping, Mapping):
        raise ConfigurationError(f"{what} must be a dict of devices here to devices there, not {mapping!r}")
    return merged_device_map(to, {}, mapping)


def merged_device_map(
    to: str, known: DeviceMap, mapping: Mapping[DeviceLike, DeviceLike]
) -> dict[torch.device, torch.device]:
    """Check a device map and return it, added to the known map for that worker. Raises `ConfigurationError`."""
    what = f"the device map for worker {to!r}"
    merged = dict(known)
    sources = {target: source for source, target in known.items()}
    for here, there in mapping.items():
        source, target = checked_device(here, what), checked_device(there, what)
        if merged.setdefault(source, target) != target:
            raise ConfigurationError(
                f"{what} sends {source} to {merged[source]} and to {target}: it must be one to one"
            )
        if sources.setdefault(target, source) != source:
            raise ConfigurationError(
                f"{what} sends {sources[target]} and {source} to {target}: it must be one to one, because results take "
                f"the same way back"
            )
    return merged


def checked_devices(devices: Iterable[DeviceLike]) -> tuple[torch.device, ...]:
    """Check the devices that the user lists for a worker, and return them. Raises `ConfigurationError`."""
    if isinstance(devices, str | int):
        raise ConfigurationError(f"devices must be a list of devices, not {devices!r}")
    checked = tuple(checked_device(device, "devices") for device in devices)
    if _CPU in checked:
        raise ConfigurationError("devices: every worker has the CPU, only others need to be named")
    if len(set(checked)) != len(checked):
        raise ConfigurationError(f"devices names one twice: {', '.join(map(str, checked))}")
    return checked


def check_device_maps(claims: Mapping[str, DeviceClaims], *, is_complete: bool) -> None:
    """Check the claims of all workers against each other. Raises `ConfigurationError`.

    ``is_complete``: no further workers will join, so a map for a worker that is not among these is an error.
    """
    for name, claim in claims.items():
        _require_there(name, claim.devices, claim, f"worker {name!r} names in RpcOptions.devices")
        for to, mapping in claim.maps.items():
            what = f"the device map of worker {name!r} for worker {to!r}"
            if to not in claims:
                if is_complete:
                    raise ConfigurationError(
                        f"{what}: there is no such worker; the group has {', '.join(map(repr, sorted(claims)))}"
                    )
                continue
            _require_there(name, mapping, claim, what)
            _require_there(to, mapping.values(), claims[to], what)


def _require_there(name: str, devices: Iterable[str], claim: DeviceClaims, what: str) -> None:
    for text in devices:
        device = torch.device(text)
        if device.type == "cpu":
            continue
        count = claim.counts.get(device.type, 0)
        if device.type == "meta" and not count:
            raise ConfigurationError(
                f"{what}: a tensor on 'meta' has no bytes that could be anywhere, and needs no map"
            )
        if (device.index or 0) >= count:
            raise ConfigurationError(
                f"{what}: worker {name!r} has no device {text}; it has "
                + (f"{device.type}:0 to {device.type}:{count - 1}" if count else f"none of type {device.type}")
            )
        if claim.devices and text not in claim.devices:
            raise ConfigurationError(
                f"{what}: worker {name!r} does not use {text}; its RpcOptions.devices are {', '.join(claim.devices)}"
            )
