"""Names that programs take from torch.distributed.rpc.rref_proxy."""

from __future__ import annotations

from arpc.compat.rref import RRefProxy

__all__ = ["RRefProxy"]
