"""Where the page is served, and where it must not be. Light to import: every worker checks its options with this."""

from __future__ import annotations

from typing import Protocol

from arpc.errors import ConfigurationError
from arpc.options import RpcOptions, split_host_port
from arpc.transport.sockets import is_loopback

__all__ = ["HttpServing", "is_open_to_all", "refuse_open_page"]


class HttpServing(Protocol):
    """A server that runs, as the runtime sees it."""

    @property
    def url(self) -> str: ...

    async def aclose(self) -> None: ...


def is_open_to_all(options: RpcOptions) -> bool:
    """Whether whoever reaches the page may see it: it cannot be reached from other hosts."""
    return is_loopback(split_host_port(options.http)[0])


def refuse_open_page(options: RpcOptions) -> None:
    """Only those who know the secret may look from beyond this host, so there must be one."""
    if options.http and options.secret is None and not is_open_to_all(options):
        raise ConfigurationError(
            f"refusing to serve the dashboard on {options.http} with no secret: anybody who reaches it could see "
            f"names, addresses and stacks of this group. Set ARPC_SECRET (or RpcOptions.secret), or serve it on "
            f"127.0.0.1 and reach it through a tunnel"
        )
