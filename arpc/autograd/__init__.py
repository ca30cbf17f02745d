"""Distributed autograd: gradients flow back along the calls that were made inside a `context`."""

from arpc.autograd.api import backward, context, get_gradients
from arpc.autograd.engine.accumulate_hooks import heed_accumulate_hooks

__all__ = ["backward", "context", "get_gradients", "heed_accumulate_hooks"]
