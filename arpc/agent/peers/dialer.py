"""Connecting to an address: which addresses of a worker can work from here, and one connection to one of them."""

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
from arpc.transport.connection import Connection, Receiver, Transport
from arpc.transport.sockets import is_loopback, split_tcp
from arpc.wire import protocol as wire
from arpc.wire.frames import Limits
from arpc.wire.handshake import Handshake, Identity, Refused, Role
from arpc.wire.messages import Refusal
from arpc.wire.values.layouts import Layout, read_layout

__all__ = ["Dialer", "host_of", "only"]

_PREFERENCE: Final = {"memory": 0, "unix": 1, "tcp": 2}


class Dialer:
    """How one worker reaches others, and under which identity."""

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
        """What this machine is called in records."""
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
        """The addresses of a worker that can work from here, the best first."""
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
        """Whether to connect: the peer may run code here, so without a secret or TLS only this host is trusted."""
        return self.options.is_guarded or self.options.insecure or is_loopback(split_tcp(address)[0])

    def protocol(
        self, role: Role, admit: Callable[[Identity], None] = lambda _: None, features: tuple[str, ...] | None = None
    ) -> wire.Protocol:
        """One end of a connection, which begins with a handshake. ``features``: in the place of the worker's own."""
        me = self.identity if features is None else msgspec.structs.replace(self.identity, features=features)
        handshake = Handshake(role, me, self.options.secret, admit)
        return wire.Protocol(handshake, self._limits, read_layout=self._read_layout)

    async def open(self, address: str, protocol: wire.Protocol) -> Connection:
        """A connection that is open."""
        connect = self.transport(address).connect(address, protocol, self._receiver)
        # a task, so that uvloop runs the connection's callbacks in this worker's context
        made = self._context.run(asyncio.get_running_loop().create_task, connect)
        try:
            connection = await made
            await connection.wait_opened()
        except (OSError, WireError):
            raise  # it has ended, or does as soon as the peer has been told why
        except BaseException:
            # It may have been made in the very moment when it was given up. One that has opened carries calls: a loop
            # that was busy may run the timer of the attempt before it wakes the task that waits for the connection
            is_made = made.done() and not made.cancelled() and made.exception() is None
            if is_made and not made.result().is_open:
                made.result().abort(WireError("the attempt was given up"))
            raise
        return connection

    async def is_alive(self, record: WorkerRecord) -> bool:
        """Whether the worker of a record, in that very incarnation, still answers at its addresses."""
        found: list[int] = []

        def look(identity: Identity) -> None:
            found.append(identity.incarnation)
            raise Refused(Refusal.STALE, "only looking whether somebody is there")

        for address in self.usable(record):
            with contextlib.suppress(OSError, ArpcError):  # what counts is which worker was found before
                async with asyncio.timeout(self.options.connect_timeout):
                    await self.open(address, self.protocol(Role.CONNECTOR, look))
        return record.incarnation in found


def only(expected: WorkerRecord | Identity) -> Callable[[Identity], None]:
    """Accept one worker as the other end of a connection, and not another that has come to its address."""

    def admit(identity: Identity) -> None:
        if (identity.name, identity.id, identity.incarnation) != (expected.name, expected.id, expected.incarnation):
            raise Refused(Refusal.STALE, f"found worker {identity.name!r} where {expected.name!r} was to be")

    return admit


def host_of(address: str) -> str:
    """The host in an address, by number or name; nothing for one that is of this host in any case."""
    return split_tcp(address)[0] if address.startswith("tcp://") else ""
