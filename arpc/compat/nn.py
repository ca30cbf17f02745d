"""The part of torch.distributed.nn that uses RPC."""

from arpc.compat.remote_module import RemoteModule

__all__ = ["RemoteModule"]
