"""The address of a remote module: ``worker/device``."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import torch

from arpc.errors import ConfigurationError

__all__ = ["Address", "parse_device"]

_RANK: Final = re.compile(r"rank:(\d+)")


class Address(NamedTuple):
    """A worker, by name or by id, and a device there."""

    worker: str | int
    device: torch.device

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse ``"ps/cuda:0"``, ``"rank:1/cpu"``, or either without a device, which is then the CPU."""
        worker, slash, device = text.partition("/")
        if not worker or (slash and not device) or "/" in device:
            raise ConfigurationError(
                f"{text!r} is no address of a module: give '<worker>/<device>', 'rank:<id>/<device>', or either "
                f"without the device"
            )
        rank = _RANK.fullmatch(worker)
        return cls(int(rank[1]) if rank else worker, parse_device(device or "cpu"))


def parse_device(device: str | torch.device) -> torch.device:
    """Return a device by its name; raise `ConfigurationError` if there is no such device."""
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ConfigurationError(f"{device!r} is no device: {error}") from None
