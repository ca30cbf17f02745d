"""A connection to a worker that can only ask questions, by a process that is in no group.

It uses arpc's own protocol, so it needs no port besides the worker's, and authenticates as workers do. The worker
accepts only questions from it (`agent.peers.link.ONLOOKER`), and does not count it among its peers.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import secrets
from itertools import count
from types import TracebackType
from typing import Any, Final, Self

from arpc.agent.codec import Codec
from arpc.agent.peers.link import ONLOOKER
from arpc.agent.server.remote_exceptions import rebuild_failure
from arpc.errors import ConfigurationError, WireError, WorkerLostError
from arpc.ids import WorkerInfo
from arpc.options import RpcOptions
from arpc.transport.connection import Connection
from arpc.transport.contract import Transport
from arpc.transport.sockets import TcpTransport, UnixTransport, is_loopback, split_tcp
from arpc.transport.tls import TlsTransport
from arpc.wire.frames import Limits, frame
from arpc.wire.handshake import Handshake, Identity, Role
from arpc.wire.messages import Failure, Inspect, Message, Reply
from arpc.wire.protocol import Protocol
from arpc.wire.values.policy import AllowList

__all__ = ["Onlooker"]

_NO_ID: Final = 0xFFFF


class Onlooker:
    """An open connection. Use it as ``async with Onlooker(address, options) as onlooker``."""

    def __init__(self, address: str, options: RpcOptions, transport: Transport | None = None) -> None:
        self._address = address
        self._options = options
        self._transport = transport or _transport(address, options)
        # it receives bytes and errors: the allow-list keeps workers from running code here
        self._codec = Codec({}, (), options.inline_tensor_bytes, None, policy=AllowList(""))
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._connection: Connection | None = None

    @property
    def worker(self) -> str:
        """The name of the worker that answers; its address before it is connected."""
        return self._connection.peer.name if self._connection is not None else self._address

    async def __aenter__(self) -> Self:
        identity = Identity(f"onlooker-{os.getpid()}", _NO_ID, secrets.randbits(63), features=(ONLOOKER,))
        limits = Limits(self._options.max_body_bytes, self._options.max_message_bytes)
        protocol = Protocol(Handshake(Role.CONNECTOR, identity, self._options.secret), limits)
        try:
            async with asyncio.timeout(self._options.connect_timeout):
                connection = await self._transport.connect(self._address, protocol, self)
                try:
                    await connection.wait_opened()
                except BaseException:
                    connection.abort()
                    raise
        except TimeoutError as error:
            seconds = self._options.connect_timeout
            raise WireError(f"no worker answered at {self._address} within {seconds} s") from error
        self._connection = connection
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connection is not None:
            self._connection.close("it has seen enough")
            await self._connection.wait_closed()

    async def ask(self, *question: Any, timeout_s: float = 30.0) -> bytes:
        """Ask the worker, and return its answer as msgpack. Raises the error of the worker, or `WorkerLostError`."""
        connection = self._connection
        if connection is None or not connection.is_open:
            raise WorkerLostError(f"the worker at {self._address} has left", self.worker)
        number = next(self._numbers)
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        payload = pickle.dumps(question, protocol=5)
        connection.send(frame(int(Inspect.type), 0, number, 1, int(timeout_s * 1000), payload))
        try:
            async with asyncio.timeout(timeout_s + 1.0):
                answer: bytes = await asked
                return answer
        finally:
            del self._asked[number]

    # -- called by the connection

    def connection_opened(self, connection: Connection) -> None: ...

    def output_drained(self, connection: Connection) -> None: ...

    def messages_received(self, connection: Connection, messages: list[Message]) -> None:
        sender = WorkerInfo(connection.peer.name, connection.peer.id)
        for message in messages:
            asked = self._asked.get(message.id)
            if asked is None or asked.done():
                continue
            if isinstance(message, Reply):
                try:
                    asked.set_result(self._codec.content(message, self._codec.slots(message), sender))
                except Exception as error:  # noqa: BLE001 - whatever a bad pickle raises
                    asked.set_exception(WireError(f"worker {self.worker!r} sent no answer that can be read: {error}"))
            elif isinstance(message, Failure):
                payload = message.body
                try:
                    failure = rebuild_failure(message.flags, payload, [], sender, "Inspect", self._codec.policy)
                except Exception as error:  # noqa: BLE001 - whatever a bad pickle raises
                    failure = WireError(f"worker {self.worker!r} sent no failure that can be read: {error}")
                asked.set_exception(failure)

    def connection_lost(self, connection: Connection, error: Exception | None) -> None:
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(WorkerLostError(f"the worker at {self._address} was lost", self.worker))


def _transport(address: str, options: RpcOptions) -> Transport:
    scheme = address.partition("://")[0]
    if scheme == "unix":
        return UnixTransport()
    if scheme == "tcp":
        if not options.is_guarded and not is_loopback(split_tcp(address)[0]):
            raise ConfigurationError(
                f"without a secret, the process that answers at {address} cannot prove that it is a worker: "
                f"set ARPC_SECRET (or --secret-file, or ARPC_TLS_CERT, ARPC_TLS_KEY and ARPC_TLS_CA)"
            )
        return TcpTransport() if options.tls is None else TlsTransport(options.tls)
    raise ConfigurationError(f"{address!r} is not an address like unix:///path, tcp://host:port or http://host:port")
