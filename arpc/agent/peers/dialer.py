"""Connects to workers: finds the addresses that can work from here, and makes one connection to one of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from contextvars import Context
from typing import Final

import msgspec

from arpc.errors import ArpcError, WireError
from arpc.group.membership import WorkerRecord
from arpc.options import RpcOptions
from arpc.transport.connection import Connection
from arpc.transport.contract import Receiver, Transport
from arpc.transport.sockets import is_loopback, split_tcp
from arpc.wire import protocol as wire
from arpc.wire.frames import Limits
from arpc.wire.handshake import Handshake, Identity, Refused, Role
from arpc.wire.messages import Refusal
from arpc.wire.values.layouts import Layout, read_layout

__all__ = ["Dialer", "host_of", "only"]

_PREFERENCE: Final = {"memory": 0, "unix": 1, "tcp": 2}


class Dialer:
    """Makes the connections of one worker to others, under its identity."""

    def __init__(
        self,
        identity: Identity,
        options: RpcOptions,
        transports: Mapping[str, Transport],
        context: Context,
        receiver: Receiver,
        read_layout: Callable[[bytes], Layout] = read_layout,
    ) -> None:
        self.identity = identity
        self.options = options
        self.transports = dict(transports)
        self.host = ""
        """The name of this machine in worker records."""
        self._context = context
        self._receiver = receiver
        self._read_layout = read_layout
        self._limits = Limits(options.max_body_bytes, options.max_message_bytes, options.max_header_bytes)

    def transport(self, address: str) -> Transport:
        scheme = address.partition("://")[0]
        transport = self.transports.get(scheme)
        if transport is None:
            raise WireError(f"no transport for {address!r}; there are {', '.join(sorted(self.transports))}")
        return transport

    def usable(self, record: WorkerRecord) -> list[str]:
        """Return the addresses of a worker that can work from here, the best first."""
        usable: list[tuple[int, str]] = []
        for address in record.addresses:
            scheme, _, rest = address.partition("://")
            if scheme not in self.transports:
                continue
            if scheme == "tcp" and not self.may_trust(address):
                continue
            if scheme == "unix" and (record.host != self.host or not os.path.exists(rest)):  # noqa: PTH110
                continue
            usable.append((_PREFERENCE.get(scheme, 9), address))
        return [address for _, address in sorted(usable)]

    def may_trust(self, address: str) -> bool:
        """Return whether to connect: the peer may run code here, so without secret or TLS only this host is trusted."""
        return self.options.is_guarded or self.options.insecure or is_loopback(split_tcp(address)[0])

    def protocol(
        self, role: Role, admit: Callable[[Identity], None] = lambda _: None, features: tuple[str, ...] | None = None
    ) -> wire.Protocol:
        """Return the protocol of one end of a connection, handshake first. ``features`` replace the worker's own."""
        me = self.identity if features is None else msgspec.structs.replace(self.identity, features=features)
        handshake = Handshake(role, me, self.options.secret, admit)
        return wire.Protocol(handshake, self._limits, read_layout=self._read_layout)

    async def open(self, address: str, protocol: wire.Protocol) -> Connection:
        """Connect, and return the connection once it is open. Raises `OSError` or `WireError` if that fails."""
        connect = self.transport(address).connect(address, protocol, self._receiver)
        # a task, so that uvloop runs the connection's callbacks in this worker's context
        made = self._context.run(asyncio.get_running_loop().create_task, connect)
        try:
            connection = await made
            await connection.wait_opened()
        except (OSError, WireError):
            raise  # the connection has ended, or will as soon as the reason is sent to the peer
        except BaseException:
            # It may have been made just when the attempt was given up. A connection that has opened carries calls, so
            # it is kept: a busy loop may run the attempt's timer before it wakes the task that waits here
            is_made = made.done() and not made.cancelled() and made.exception() is None
            if is_made and not made.result().is_open:
                made.result().abort(WireError("the attempt was given up"))
            raise
        return connection

    async def is_alive(self, record: WorkerRecord) -> bool:
        """Return whether the worker of a record, in exactly that incarnation, still answers at its addresses."""
        found: list[int] = []

        def look(identity: Identity) -> None:
            found.append(identity.incarnation)
            raise Refused(Refusal.STALE, "this was a check whether the worker is alive")

        for address in self.usable(record):
            with contextlib.suppress(OSError, ArpcError):  # only the worker found before that counts
                async with asyncio.timeout(self.options.connect_timeout):
                    await self.open(address, self.protocol(Role.CONNECTOR, look))
        return record.incarnation in found


def only(expected: WorkerRecord | Identity) -> Callable[[Identity], None]:
    """Return a check that accepts one worker as the peer, and raises `Refused` for another at its address."""

    def admit(identity: Identity) -> None:
        if (identity.name, identity.id, identity.incarnation) != (expected.name, expected.id, expected.incarnation):
            raise Refused(Refusal.STALE, f"found worker {identity.name!r} where {expected.name!r} was to be")

    return admit


def host_of(address: str) -> str:
    """Return the host in an address, by number or name; empty for an address that is always on this host."""
    return split_tcp(address)[0] if address.startswith("tcp://") else ""
