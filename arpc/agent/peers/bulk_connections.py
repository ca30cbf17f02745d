"""Further connections for large tensors, the *lanes* of a TCP connection: see `transport.striping`.

Handshake features tie them together: the main connection has a token, and each lane names the token of its main
connection.
"""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING, Final

from arpc.agent.peers.dialer import only
from arpc.errors import WireError
from arpc.log import get_logger
from arpc.transport.connection import Connection
from arpc.transport.striping import Lanes
from arpc.wire import protocol as wire
from arpc.wire.handshake import Identity, Refused, Role
from arpc.wire.messages import Refusal

if TYPE_CHECKING:
    from arpc.agent.peers.connector import Connector

__all__ = ["BulkConnections"]

logger = get_logger("arpc.connections")

_MAIN: Final = "lanes:"
_LANE: Final = "lane-of:"


class BulkConnections:
    """Opens lanes to peers, and accepts theirs."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._dialer = connector.dialer
        self._joining: dict[wire.Protocol, Connection] = {}
        """Lanes in their handshake, each with the connection that it belongs to."""

    # -- lanes to peers

    def token(self, address: str) -> str:
        """Return a token that ties lanes to a new connection to an address; empty if it is to have no lanes."""
        return secrets.token_hex(8) if self._dialer.options.bulk_connections and address.startswith("tcp://") else ""

    def features(self, token: str) -> tuple[str, ...]:
        """Return the features of a main connection, with its token."""
        features = self._dialer.identity.features
        return (*features, _MAIN + token) if token else features

    async def open(self, main: Connection, address: str, token: str) -> None:
        """Open the lanes of a connection. If that fails, it works without them, only not as fast."""
        peer = main.peer
        for _ in range(self._dialer.options.bulk_connections):
            # a lane has none of the other features of a main connection
            protocol = self._dialer.protocol(Role.CONNECTOR, only(peer), features=(_LANE + token,))
            # before the handshake: the first chunk may come with its last message
            protocol.join(main.protocol)
            self._joining[protocol] = main
            try:
                await self._dialer.open(address, protocol)
            except (OSError, WireError) as error:
                # if the main connection was lost meanwhile, this is no surprise
                level = logging.WARNING if main.is_open else logging.DEBUG
                logger.log(
                    level,
                    "no further connection for large tensors to worker %s: %s",
                    peer.name,
                    error,
                    extra={"peer": peer.name},
                )
                return
            finally:
                self._joining.pop(protocol, None)

    # -- lanes of peers

    def admit(self, identity: Identity, protocol: wire.Protocol) -> bool:
        """Let a lane of a peer join the connection in whose handshake the peer has sent its token.

        False if it is no lane; raises `Refused` if there is no such connection.
        """
        token = _feature(identity, _LANE)
        if token is None:
            return False
        main = self._connector.main_link(identity)
        if main is None or _feature(main.connection.peer, _MAIN) != token:
            raise Refused(Refusal.STALE, "there is no connection that this one could belong to")
        protocol.join(main.connection.protocol)
        self._joining[protocol] = main.connection
        return True

    # -- called by connections

    def opened(self, connection: Connection) -> bool:
        """Use a connection that has opened, if it is a lane; returns whether it is one."""
        main = self._joining.pop(connection.protocol, None)
        if main is None:
            return False
        if not main.is_open:
            connection.abort(WireError("the connection that it belongs to has ended"))
            return True
        if main.lanes is None:
            main.lanes = Lanes(main)
        main.lanes.attach(connection)
        return True

    def lost(self, connection: Connection) -> None:
        self._joining.pop(connection.protocol, None)


def _feature(identity: Identity, name: str) -> str | None:
    """Return the value of a handshake feature of that name, None if there is none."""
    for feature in identity.features:
        if feature.startswith(name):
            return feature.removeprefix(name)
    return None
