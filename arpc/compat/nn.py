"""torch.distributed.nn, as far as it is about RPC."""

from arpc.compat.remote_module import RemoteModule

__all__ = ["RemoteModule"]
