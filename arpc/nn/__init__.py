"""Modules that are on other workers."""

from arpc.nn.remote_module import RemoteModule, parameter_rrefs

__all__ = ["RemoteModule", "parameter_rrefs"]
