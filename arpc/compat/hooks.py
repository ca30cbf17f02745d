"""What has to change in torch itself so that its own code takes futures and RRefs of arpc for its own."""

from __future__ import annotations

import torch

from arpc.compat.futures import wait_all

__all__ = ["install"]


def install() -> None:
    """Make the changes. Done twice, it changes nothing more."""
    torch.futures.wait_all = wait_all
