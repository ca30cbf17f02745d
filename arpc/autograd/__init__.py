"""Distributed autograd: gradients flow back along the calls that were made inside a `context`."""

from arpc.autograd.api import backward, context, get_gradients

__all__ = ["backward", "context", "get_gradients"]
