"""Profiles that reach over calls."""

from arpc.profiler.keys import RemoteProfilerManager
from arpc.profiler.service import current

__all__ = ["RemoteProfilerManager", "current"]
