"""Optimizers over parameters that are on many workers."""

from arpc.optim.distributed_optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
