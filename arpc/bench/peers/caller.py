"""What the awaitable peers have in common."""

from __future__ import annotations

import abc

from arpc.bench.asyncio_caller import AsyncioCaller, Call

__all__ = ["PeerCaller"]


class PeerCaller(AsyncioCaller):
    """Three figures: small call, rate, and a large send. The functions are ``noop``, ``drop`` and ``forget``."""

    @abc.abstractmethod
    def prepare_noop(self) -> Call:
        """A call without arguments or result."""

    @abc.abstractmethod
    def prepare_send(self, size_bytes: int) -> Call:
        """A call that sends one array and has no result."""

    def prepare(self, function: str, flavour: str, payload: str) -> Call:
        return self.prepare_noop()

    def prepare_started(self, function: str, flavour: str, payload: str) -> Call:
        return self.prepare_noop()

    def prepare_bulk(self, function: str, size_bytes: int) -> Call:
        return self.prepare_send(size_bytes)
