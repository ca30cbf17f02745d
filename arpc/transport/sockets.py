"""Byte streams of the operating system: ``tcp://host:port`` and ``unix:///path``."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import secrets
import socket
import stat
import struct
import tempfile
import weakref
from collections.abc import Callable
from fcntl import ioctl
from functools import cached_property, partial
from pathlib import Path
from termios import TIOCOUTQ
from typing import Any, Final, NamedTuple, Self, cast
from urllib.parse import urlsplit

from arpc.errors import ConfigurationError, HandshakeError, WireError
from arpc.transport.buffer_pool import BufferPool
from arpc.transport.busy_poll import BusyPoll, can_run_at_once
from arpc.transport.connection import Connection, Phase
from arpc.transport.connection_limits import ConnectionLimits
from arpc.transport.contract import Accept, Listener, Receiver, Transport
from arpc.transport.forked_children import close_in_children
from arpc.transport.shm import Arena, Channel
from arpc.transport.write_lock import WriteLock, write_pieces
from arpc.wire.protocol import Protocol

__all__ = ["NO_RESOURCES", "Resources", "StreamConnection", "TcpTransport", "UnixTransport", "connect_socket"]

# Measured: a small frame waits for all bytes in the socket, and a larger buffer makes large tensors no faster
_SOCKET_BUFFER: Final = 1 << 17
_MAX_UNIX_PATH: Final = 100
# A whole group may connect at the same moment, and a unix socket whose backlog is full refuses at once
_BACKLOG: Final = 2048
_PEER_CREDENTIALS: Final = struct.Struct("iII")
_INT: Final = struct.Struct("i")


class Resources(NamedTuple):
    """The objects that all socket connections of one worker share."""

    memory: BufferPool | None = None
    """The pool of memory that large tensors are read into."""
    arena: Arena | None = None
    """The shared memory for large tensors, between processes of one host that are connected by a unix socket."""
    limits: ConnectionLimits | None = None
    busy_poll: BusyPoll | None = None


NO_RESOURCES: Final = Resources()


class StreamConnection(Connection, asyncio.BufferedProtocol):
    """A connection over an asyncio transport, uvloop's or the standard library's."""

    _transport: asyncio.Transport
    _set_protocol: Callable[[asyncio.BaseProtocol], None]
    peer_process: int | None = None

    def __init__(self, protocol: Protocol, receiver: Receiver, resources: Resources) -> None:
        super().__init__(protocol, receiver)
        self._arena = resources.arena
        self._busy_poll = resources.busy_poll
        if resources.memory is not None:
            protocol.allocate = resources.memory.allocate
        self._write_lock: WriteLock | None = None
        self._active_poll: BusyPoll | None = None
        self._is_made = False
        self._has_eof = False

    # -- called by asyncio; uvloop looks up the first two in `set_protocol`, and not again

    @property
    def get_buffer(self) -> Callable[[int], memoryview]:
        """The function that returns the buffer for the next bytes, whatever size it is called with."""
        return self.protocol.get_buffer

    @property
    def buffer_updated(self) -> Callable[[int], None]:
        """The function for bytes that were read, called with their number. Never raises, see `Connection._received`."""
        return self._received if self._active_poll is None else self._received_while_polled

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the same methods, but no common base class
        self._transport = transport = cast("asyncio.Transport", transport)
        self._is_made = True
        if self._phase is Phase.ABORTED:
            transport.abort()
            return
        # Writes are gathered before they come here: uvloop must pass them on at once, or call `pause_writing`
        transport.set_write_buffer_limits(high=0)
        sock = self._socket = transport.get_extra_info("socket")
        close_in_children(sock.fileno())
        self.address = _describe(sock)
        _tune(sock)
        self._set_protocol = transport.set_protocol
        try:
            self.peer_process = _process_at(sock, self.address)
        except HandshakeError as error:
            self.abort(error)
            return
        if self._arena is not None and sock.family == socket.AF_UNIX:
            self.shared_memory = self.protocol.lender = Channel(self, self._arena)
        self._begin(transport)

    def _begin(self, transport: asyncio.Transport) -> None:
        """Start on a transport that is connected."""
        self._write = transport.write
        self._write_pieces = partial(write_pieces, transport)
        self.start()

    def _greeted(self) -> None:
        super()._greeted()
        if self._busy_poll is not None and self.is_open:
            self._busy_poll.join(self)

    def eof_received(self) -> bool:
        self._has_eof = True
        # Our half closes too, once all output from before `close` is out
        return self._phase is Phase.CLOSING and bool(self.bulk)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._busy_poll is not None:
            self._busy_poll.leave(self)
        if self._write_lock is not None:
            self._write_lock.end()
        self._ended(exc)

    # -- called by the busy poll

    @cached_property
    def is_local(self) -> bool:
        # cached: the busy poll asks again and again
        address = self.address
        return address.startswith("unix://") or (address.startswith("tcp://") and is_loopback(split_tcp(address)[0]))

    def set_busy_poll(self, busy_poll: BusyPoll | None) -> None:
        if busy_poll is self._active_poll or not self.is_open:
            return
        self._active_poll = busy_poll
        self._set_protocol(self)  # uvloop looks `buffer_updated` up now

    def _received_while_polled(self, size_bytes: int) -> None:
        self._received(size_bytes)
        if self._active_poll is not None:
            self._active_poll.received(self.loop)

    # -- threads

    @property
    def is_peer_elsewhere(self) -> bool:
        return can_run_at_once(self)

    def share_writing(self) -> WriteLock | None:
        if self._write_lock is None and self.is_open:
            try:
                sock = _duplicate(self._socket)
            except OSError:
                return None  # no descriptor is left
            self._write_lock = WriteLock(self._transport, sock, self)
            self._write = self._write_lock.write
            self._write_pieces = self._write_lock.writelines
        return self._write_lock

    def close(self, reason: str = "") -> None:
        if self._write_lock is not None:
            self._write_lock.shut()  # nothing may be sent after GOODBYE
            self._write_lock.write_rest()
        super().close(reason)

    def abort(self, error: Exception | None = None) -> None:
        if self._write_lock is not None:
            self._write_lock.shut()
        super().abort(error)

    def count_sent(self) -> int:
        return self.bytes_sent + (0 if self._write_lock is None else self._write_lock.bytes_sent)

    def statistics(self) -> dict[str, int]:
        counts = super().statistics()
        if self._write_lock is not None:
            counts["frames_sent"] += self._write_lock.frames_sent
            counts["writes"] += self._write_lock.writes
        return counts

    # -- called by Connection

    def _unsent_bytes(self) -> int:
        return (self._write_lock or self._transport).get_write_buffer_size()

    def _unacknowledged_bytes(self) -> int:
        try:
            (queued_bytes,) = _INT.unpack(ioctl(self._socket.fileno(), TIOCOUTQ, bytes(_INT.size)))
        except (OSError, ValueError):
            return 0  # a system without this request, or a socket that was closed just now
        return int(queued_bytes)

    def _shut(self) -> None:
        self._transport.close()

    def _end_writing(self) -> None:
        if self._has_eof or not self._transport.can_write_eof():
            self._transport.close()
        else:
            self._transport.write_eof()

    def _abort(self) -> None:
        if self._is_made:
            # Not at once: asyncio's own transport must not be aborted in the middle of `resume_writing`
            self.loop.call_soon(self._transport.abort)


def _duplicate(sock: socket.socket) -> socket.socket:
    """Return a real socket with a new descriptor of the same one. The loop's object may only look like a socket."""
    descriptor = os.dup(sock.fileno())
    try:
        duplicate = socket.socket(sock.family, sock.type, sock.proto, fileno=descriptor)
    except OSError:
        os.close(descriptor)
        raise
    close_in_children(descriptor)
    duplicate.setblocking(False)  # as the original is, whatever default timeout new sockets have
    return duplicate


def _describe(sock: socket.socket) -> str:
    with contextlib.suppress(OSError):
        if sock.family == socket.AF_UNIX:
            return f"unix://{sock.getsockname() or sock.getpeername()}"
        return tcp_address(*sock.getpeername()[:2])
    return "?"


def _tune(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # a matter of speed only
        if sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _process_at(sock: socket.socket, address: str) -> int | None:
    """Return the id of the process that listened or connected at the other end of a unix socket; None if unknown.

    Raises `HandshakeError` if it belongs neither to this user nor to root: because of this check, a unix socket needs
    no secret. Where the system does not report the user, only the 0700 directory protects the socket.
    """
    if sock.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return None
    try:
        process, uid = _credentials(sock)
    except OSError:
        process, uid = 0, -1  # a peer whose credentials cannot be read is not trusted
    if uid not in {os.getuid(), 0}:
        raise HandshakeError(f"a process of another user ({uid}) is at the other end of {address}")
    return process or None


def _credentials(sock: socket.socket) -> tuple[int, int]:
    process, uid, _ = _PEER_CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    )
    return process, uid


class _StreamListener(Listener):
    _server: asyncio.AbstractServer
    _remove: weakref.finalize[..., Any] | None = None

    def __init__(self, accept: Accept, transport: _StreamTransport) -> None:
        super().__init__(accept, transport.resources.limits)
        self._transport = transport

    def accept(self) -> StreamConnection:
        return self._track(self._transport.make(*self._accept(), is_accepted=True))

    def opened(self, server: asyncio.AbstractServer, address: str, path: str | None = None) -> Self:
        self._server = server
        self.address = address
        for sock in cast("asyncio.Server", server).sockets:
            close_in_children(sock.fileno())
        if path is not None:
            # also when the process ends and the listener was not closed
            self._remove = weakref.finalize(self, _remove_socket, path, os.getpid())
        return self

    async def aclose(self) -> None:
        # Not wait_closed(): it waits for the connections too, which have owners of their own
        self._server.close()
        if self._remove is not None:
            self._remove()
        self._abort_handshakes()


def _remove_socket(path: str, process_id: int) -> None:
    if os.getpid() == process_id:  # a forked child has the object too, but does not own the socket
        with contextlib.suppress(OSError):
            Path(path).unlink()


class _StreamTransport(Transport):
    def __init__(self, resources: Resources = NO_RESOURCES) -> None:
        self.resources = resources

    def make(self, protocol: Protocol, receiver: Receiver, *, is_accepted: bool = False) -> StreamConnection:
        """Return a new connection, which is about to be made by this side, or was accepted."""
        return StreamConnection(protocol, receiver, self.resources)


class TcpTransport(_StreamTransport):
    """``tcp://host:port``; port 0 lets the system choose."""

    async def connect(self, address: str, protocol: Protocol, receiver: Receiver) -> Connection:
        host, port = split_tcp(address)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: self.make(protocol, receiver), host, port)
        return connection

    async def listen(self, address: str, accept: Accept) -> Listener:
        host, port = split_tcp(address)
        loop = asyncio.get_running_loop()
        listener = _StreamListener(accept, self)
        server = await loop.create_server(listener.accept, host, port, backlog=_BACKLOG)
        port = server.sockets[0].getsockname()[1]
        return listener.opened(server, tcp_address(host, port))


class UnixTransport(_StreamTransport):
    """``unix:///path``; ``unix://`` alone chooses a path in a directory that only this user can enter."""

    async def connect(self, address: str, protocol: Protocol, receiver: Receiver) -> Connection:
        path = split_unix(address)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_unix_connection(lambda: self.make(protocol, receiver), path)
        return connection

    async def listen(self, address: str, accept: Accept) -> Listener:
        if address == "unix://":
            path = str(_tidied(socket_directory()) / f"{os.getpid()}-{secrets.token_hex(4)}.sock")
        else:
            path = split_unix(address)
        sock = _bind_unix(path)
        loop = asyncio.get_running_loop()
        listener = _StreamListener(accept, self)
        try:
            server = await loop.create_unix_server(listener.accept, sock=sock, backlog=_BACKLOG)
        except BaseException:
            sock.close()
            _remove_socket(path, os.getpid())
            raise
        return listener.opened(server, f"unix://{path}", path)


async def connect_socket(address: str) -> socket.socket:
    """Return a connected non-blocking socket, for callers that move bytes themselves. Raises as `Transport.connect`."""
    loop = asyncio.get_running_loop()
    targets: list[tuple[int, Any]]
    if address.startswith("unix://"):
        targets = [(socket.AF_UNIX, split_unix(address))]
    else:
        found = await loop.getaddrinfo(*split_tcp(address), type=socket.SOCK_STREAM)
        targets = [(family, target) for family, _, _, _, target in found]
    failure = OSError(f"{address} has no address")
    for family, target in targets:
        sock = socket.socket(family, socket.SOCK_STREAM)
        close_in_children(sock.fileno())
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, target)
            _process_at(sock, address)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            _tune(sock)
            return sock
    raise failure


def _bind_unix(path: str) -> socket.socket:
    """Bind a socket that only this user can connect to; one that a dead process left is replaced. Raises `OSError`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    close_in_children(sock.fileno())
    try:
        try:
            sock.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not _is_abandoned(path):
                raise OSError(error.errno, f"cannot listen on unix://{path}: {error.strerror}") from error
            Path(path).unlink(missing_ok=True)
            sock.bind(path)
        Path(path).chmod(0o600)  # before any peer can connect: the socket does not listen yet
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _is_abandoned(path: str) -> bool:
    """Whether a path is a socket that no process listens on. Asyncio would also remove one that is in use."""
    if not stat.S_ISSOCK(Path(path).lstat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) == errno.ECONNREFUSED


def split_unix(address: str) -> str:
    """Return the path of ``unix:///path``. Raises `ConfigurationError` for other addresses."""
    scheme, _, path = address.partition("://")
    if scheme != "unix" or not path.startswith("/") or "\0" in path:
        raise ConfigurationError(f"{address!r} is not an address like unix:///path")
    if len(os.fsencode(path)) > _MAX_UNIX_PATH:
        raise ConfigurationError(f"the path of a unix socket may have {_MAX_UNIX_PATH} bytes: {path}")
    return path


def split_tcp(address: str) -> tuple[str, int]:
    """Return the host and port of ``tcp://host:port``. Raises `ConfigurationError` for other addresses."""
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not parts.hostname or port is None:
        raise ConfigurationError(f"{address!r} is not an address like tcp://host:port (port 0: any)")
    return parts.hostname, port


def tcp_address(host: str, port: int) -> str:
    """Return ``tcp://host:port``, which `split_tcp` takes apart."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host, as an address or a name, is this machine, and cannot be reached from another one."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name could stand for any host


def _tidied(directory: Path) -> Path:
    """Remove the sockets that killed processes have left in a directory, and return the directory."""
    for path in directory.glob("*.sock"):
        pid = path.name.partition("-")[0]
        if not pid.isdecimal() or is_running(int(pid)):
            continue
        # The process may run in another PID namespace: only a socket without a listener is dead for sure
        with contextlib.suppress(OSError):
            if _is_abandoned(str(path)):
                path.unlink(missing_ok=True)
    return directory


def is_running(pid: int) -> bool:
    """Whether there is a process with this id, of any user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def socket_directory() -> Path:
    """Return the directory of this user's sockets. Raises `WireError` if another user could have made it."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if not os.access(base, os.W_OK | os.X_OK):
        base = tempfile.gettempdir()  # in containers and under sudo the variable often names no directory
    if len(base) > _MAX_UNIX_PATH - 40:
        base = "/tmp"  # noqa: S108 - paths of sockets must be short; the directory below is checked
    path = Path(base) / f"arpc-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise WireError(f"{path} must be a directory that only its owner, this user, can enter (mode 0700)")
    return path
