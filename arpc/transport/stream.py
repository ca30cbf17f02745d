"""Byte streams of the operating system: ``tcp://host:port`` and ``unix:///path``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import stat
import struct
import tempfile
from pathlib import Path
from typing import Final, cast
from urllib.parse import urlsplit

from arpc.errors import ConfigurationError, HandshakeError, WireError
from arpc.transport.base import Accept, Connection, Listener, Receiver, Transport
from arpc.wire.protocol import Protocol

__all__ = ["StreamConnection", "TcpTransport", "UnixTransport"]

# Enough for the kernel to always have something to send, little enough that a small frame passes soon
_HIGH_WATER: Final = 1 << 20
_LOW_WATER: Final = 1 << 18
_SOCKET_BUFFER: Final = 1 << 22
_MAX_UNIX_PATH: Final = 100


class StreamConnection(asyncio.BufferedProtocol, Connection):
    """A connection over an asyncio transport, uvloop's or the standard library's."""

    _transport: asyncio.Transport

    def __init__(self, protocol: Protocol, receiver: Receiver) -> None:
        Connection.__init__(self, protocol, receiver)
        self._address = "?"

    @property
    def address(self) -> str:
        return self._address

    # -- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are of no common class, only of the same shape
        self._transport = transport = cast("asyncio.Transport", transport)
        transport.set_write_buffer_limits(high=_HIGH_WATER, low=_LOW_WATER)
        sock = transport.get_extra_info("socket")
        self._address = _describe(sock)
        _tune(sock)
        stranger = _other_user(sock)
        if stranger is not None:
            self.abort(HandshakeError(f"a process of another user ({stranger}) is at the other end of {self.address}"))
            return
        self.start()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the contract of asyncio
        return self.protocol.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._received(nbytes)

    def eof_received(self) -> bool:
        return False  # close our half too

    def pause_writing(self) -> None:
        self._congested()

    def resume_writing(self) -> None:
        self._drained()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended(exc)

    # -- called by Connection

    def _write(self, data: bytes) -> None:
        self._transport.write(data)

    def _write_chunk(self, header: bytes, chunk: memoryview) -> None:
        self._transport.writelines((header, chunk))

    def _unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    def _shut(self) -> None:
        self._transport.close()

    def _abort(self) -> None:
        self._transport.abort()


def _describe(sock: socket.socket) -> str:
    with contextlib.suppress(OSError):
        if sock.family == socket.AF_UNIX:
            return f"unix://{sock.getsockname() or sock.getpeername()}"
        host, port = sock.getpeername()[:2]
        return f"tcp://{_bracket(host)}:{port}"
    return "?"


def _tune(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # a matter of speed only
        if sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _other_user(sock: socket.socket) -> int | None:
    """Who is there, if not this user or root. A unix socket may go without a secret because of this."""
    if sock.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return None  # elsewhere the 0700 directory stands guard alone
    try:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError:
        return None  # closed meanwhile
    _, uid, _ = struct.unpack("3i", credentials)
    return None if uid in {os.getuid(), 0} else int(uid)


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class _StreamListener(Listener):
    def __init__(self, server: asyncio.Server, address: str, path: str | None = None) -> None:
        self._server = server
        self._address = address
        self._path = path

    @property
    def address(self) -> str:
        return self._address

    async def aclose(self) -> None:
        # Not wait_closed(): it waits for the connections too, which have owners of their own
        self._server.close()
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                Path(self._path).unlink()


def _acceptor(accept: Accept) -> StreamConnection:
    protocol, receiver = accept()
    return StreamConnection(protocol, receiver)


class TcpTransport(Transport):
    """``tcp://host:port``; port 0 lets the system choose."""

    async def connect(self, address: str, protocol: Protocol, receiver: Receiver) -> Connection:
        host, port = split_tcp(address)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: StreamConnection(protocol, receiver), host, port)
        return connection

    async def listen(self, address: str, accept: Accept) -> Listener:
        host, port = split_tcp(address)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _acceptor(accept), host, port)
        port = server.sockets[0].getsockname()[1]
        return _StreamListener(server, f"tcp://{_bracket(host)}:{port}")


class UnixTransport(Transport):
    """``unix:///path``; ``unix://`` alone lets us choose a path in a directory only this user can enter."""

    async def connect(self, address: str, protocol: Protocol, receiver: Receiver) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_unix_connection(
            lambda: StreamConnection(protocol, receiver), address.removeprefix("unix://")
        )
        return connection

    async def listen(self, address: str, accept: Accept) -> Listener:
        path = address.removeprefix("unix://") or str(socket_directory() / f"{os.getpid()}-{secrets.token_hex(4)}.sock")
        if len(path) > _MAX_UNIX_PATH:
            raise ConfigurationError(f"the path of a unix socket may have {_MAX_UNIX_PATH} characters: {path}")
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(lambda: _acceptor(accept), path)
        Path(path).chmod(0o600)
        return _StreamListener(server, f"unix://{path}", path)


def split_tcp(address: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port``."""
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not parts.hostname or port is None:
        raise ConfigurationError(f"{address!r} is not an address like tcp://host:port (port 0: any)")
    return parts.hostname, port


def socket_directory() -> Path:
    """Where this user's sockets are. Raises `WireError` if someone else could have made it."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    if len(base) > _MAX_UNIX_PATH - 40:
        base = "/tmp"  # noqa: S108 - paths of sockets must be short; the directory below is checked
    path = Path(base) / f"arpc-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise WireError(f"{path} must be a directory that only its owner, this user, can enter (mode 0700)")
    return path
