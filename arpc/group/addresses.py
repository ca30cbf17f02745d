"""A worker's default addresses, the addresses by which peers reach it, and the check against unguarded ones."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Final

from arpc.errors import ConfigurationError
from arpc.log import get_logger
from arpc.options import RpcOptions
from arpc.transport.sockets import is_loopback, split_tcp, tcp_address

__all__ = ["check_guarded", "default_addresses", "reachable_address"]

logger = get_logger("arpc.addresses")

# Addresses that stand for all interfaces, each with one beyond this machine (for documentation, never reached)
_EVERYWHERE: Final = {"0.0.0.0": "192.0.2.1", "::": "2001:db8::1"}  # noqa: S104 - only compared with
_DISCARD_PORT: Final = 9
_SHORT_SECRET_BYTES: Final = 16


async def default_addresses(options: RpcOptions, store_host: str | None) -> tuple[str, ...]:
    """Return a unix socket, and a TCP address as far as the group reaches.

    Within this machine the unix socket is enough, and only this user can connect to it; to loopback TCP all users of
    the machine could. Raises `ConfigurationError` for a group beyond this machine without a secret or TLS.
    """
    unix = ("unix://",) if hasattr(socket, "AF_UNIX") else ()
    interface = None if store_host is None else await _interface_to(store_host)
    if interface is None or is_loopback(interface):
        return (*unix, "tcp://127.0.0.1:0") if options.is_guarded or not unix else unix
    if not options.is_guarded and not options.insecure:
        raise ConfigurationError(
            f"the group's store is on {store_host}, so this worker must be reachable from there, and anyone who can "
            f"reach it could run code in it. Set the same ARPC_SECRET (or RpcOptions.secret) on all workers, or give "
            f"each of them a certificate (RpcOptions.tls)"
        )
    return (*unix, tcp_address(interface, 0))


async def reachable_address(address: str, store_host: str | None) -> str:
    """Return an address as peers reach it: "all interfaces" becomes the one towards the store, or other hosts."""
    if not address.startswith("tcp://"):
        return address
    host, port = split_tcp(address)
    beyond = _EVERYWHERE.get(host)
    if beyond is None:
        return address
    interface = None if store_host is None or is_loopback(store_host) else await _interface_to(store_host)
    if interface is None:
        interface = _interface_towards(beyond, socket.AF_INET6 if ":" in beyond else socket.AF_INET)
    return tcp_address(interface or ("::1" if ":" in host else "127.0.0.1"), port)


def check_guarded(addresses: Sequence[str], options: RpcOptions) -> None:
    """Raise `ConfigurationError` for addresses beyond this host without a secret or TLS: unpickling runs code."""
    for address in addresses:
        if not address.startswith("tcp://") or is_loopback(split_tcp(address)[0]):
            continue
        if not options.is_guarded:
            if not options.insecure:
                raise ConfigurationError(
                    f"refusing to listen on {address} with no secret: any process that reaches that port could run "
                    f"code here. Set ARPC_SECRET (or RpcOptions.secret) to the same value on all workers, or "
                    f"RpcOptions.tls, or listen on 127.0.0.1"
                )
            logger.warning("listening on %s WITHOUT A SECRET: any process that reaches it can run code here", address)
        elif options.secret is not None and options.tls is None and len(options.secret) < _SHORT_SECRET_BYTES:
            logger.warning(
                "listening on %s with a secret of %d bytes, which can be guessed from an observed handshake: "
                "take one of %d random bytes or more",
                address,
                len(options.secret),
                _SHORT_SECRET_BYTES,
            )


async def _interface_to(host: str) -> str:
    """Return the address of this machine's interface towards a host. Raises `ConfigurationError` if there is none."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)
    except OSError as error:
        # the name of a Kubernetes pod resolves some time after the pod is up; others reach its outward address
        is_here = host.partition(".")[0] == socket.gethostname().partition(".")[0]
        outwards = _interface_towards(_EVERYWHERE["0.0.0.0"], socket.AF_INET) if is_here else None  # noqa: S104
        if outwards is not None:
            return outwards
        raise ConfigurationError(f"the group's store is on {host!r}, which cannot be found: {error}") from error
    for family, _, _, _, destination in found:
        interface = _interface_towards(str(destination[0]), socket.AddressFamily(family))
        if interface is not None:
            return interface
    raise ConfigurationError(f"the group's store is on {host!r}, and no interface of this machine leads there")


def _interface_towards(address: str, family: socket.AddressFamily) -> str | None:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # connecting a datagram socket sends nothing; it only tells which interface leads there
            probe.connect((address, _DISCARD_PORT))
            return str(ip_address(probe.getsockname()[0]))
    except (OSError, ValueError):
        return None
