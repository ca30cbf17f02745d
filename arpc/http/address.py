"""The address of the dashboard, and whether it is allowed. Cheap to import: every worker checks its options with it."""

from __future__ import annotations

from typing import Protocol

from arpc.errors import ConfigurationError
from arpc.options import RpcOptions, split_host_port
from arpc.transport.sockets import is_loopback

__all__ = ["HttpServing", "is_open_to_all", "refuse_open_page"]


class HttpServing(Protocol):
    """The interface of a running server, for the runtime."""

    @property
    def url(self) -> str: ...

    async def aclose(self) -> None: ...


def is_open_to_all(options: RpcOptions) -> bool:
    """Return whether the dashboard needs no secret, because it cannot be reached from other hosts."""
    return is_loopback(split_host_port(options.http)[0])


def refuse_open_page(options: RpcOptions) -> None:
    """Raise `ConfigurationError` if the dashboard could be read from other hosts without a secret."""
    if options.http and options.secret is None and not is_open_to_all(options):
        raise ConfigurationError(
            f"refusing to serve the dashboard on {options.http} with no secret: any process that reaches it could see "
            f"names, addresses and stacks of this group. Set ARPC_SECRET (or RpcOptions.secret), or serve it on "
            f"127.0.0.1 and reach it through a tunnel"
        )
