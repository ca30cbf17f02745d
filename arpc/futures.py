"""Futures, and functions that wait for several of them."""

from arpc.agent.client.future import Future, collect_all, wait_all

__all__ = ["Future", "collect_all", "wait_all"]
