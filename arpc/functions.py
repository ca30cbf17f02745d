"""Marks for functions that are called remotely."""

from arpc.agent.functions import async_execution, inline

__all__ = ["async_execution", "inline"]
