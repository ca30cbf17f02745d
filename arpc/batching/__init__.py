"""Server-side micro-batching: many calls of a function, run as one."""

from arpc.batching.decorator import Batched, batched
from arpc.batching.gathering import gather, scatter

__all__ = ["Batched", "batched", "gather", "scatter"]
