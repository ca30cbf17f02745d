"""Decorators for functions that are called remotely."""

from arpc.agent.server.functions import async_execution, inline

__all__ = ["async_execution", "inline"]
