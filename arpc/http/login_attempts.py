"""A limit on concurrent logins from each address, so that guessing clients do not keep other users out."""

from __future__ import annotations

import ipaddress
from typing import Final

__all__ = ["LoginAttempts"]

_PER_ADDRESS: Final = 8
_ADDRESSES: Final = 1024
_IPV6_PREFIX_BITS: Final = 64  # the network of one customer of a provider, who can connect from any address in it


class LoginAttempts:
    """Logins in progress, by the address that they come from.

    The table is bounded. When it is full, the address that has been in it longest is removed: a client that logs
    in from more addresses than the table holds gets some more attempts, and no user is refused because of that.
    """

    def __init__(self, per_address: int = _PER_ADDRESS, addresses: int = _ADDRESSES) -> None:
        self._per_address = per_address
        self._addresses = addresses
        self._under_way: dict[str, int] = {}

    def begin(self, address: str | None) -> bool:
        """Return whether one more login from this address may begin; if so, call `end` after it."""
        origin = _origin(address)
        count = self._under_way.get(origin, 0)
        if count >= self._per_address:
            return False
        if not count and len(self._under_way) >= self._addresses:
            del self._under_way[next(iter(self._under_way))]
        self._under_way[origin] = count + 1
        return True

    def end(self, address: str | None) -> None:
        origin = _origin(address)
        count = self._under_way.get(origin, 0)
        if count > 1:
            self._under_way[origin] = count - 1
        else:
            self._under_way.pop(origin, None)

    def __len__(self) -> int:
        """Return the number of addresses with logins in progress."""
        return len(self._under_way)


def _origin(address: str | None) -> str:
    """Return what counts as one client: an address, or for IPv6 the network that it is in.

    >>> _origin("192.0.2.7"), _origin("::ffff:192.0.2.7"), _origin("2001:db8::7")
    ('192.0.2.7', '192.0.2.7', '2001:db8::/64')
    """
    try:
        parsed = ipaddress.ip_address(address or "")
    except ValueError:
        return address or ""
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is None:
            bare = parsed.compressed.partition("%")[0]
            return str(ipaddress.ip_network((bare, _IPV6_PREFIX_BITS), strict=False))
        return str(parsed.ipv4_mapped)
    return str(parsed)
