"""Stores over TCP: one process serves, the others connect as soon as it does.

The loop tries to connect before torch does: a connect inside torch cannot be cancelled, may never return, and prints
the errors that it meets. Torch gets an address that has just answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Final, Literal
from urllib.parse import SplitResult

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # torch says no __all__

from arpc.errors import ConfigurationError, RendezvousError, RendezvousTimeoutError
from arpc.group.group_store import Access, GroupStore, KeyValues, StoreThread, first_line
from arpc.group.launch_env import variable, whole_number
from arpc.transport.forked_children import close_port_in_children, leave_port_to_children
from arpc.transport.sockets import is_loopback, tcp_address

__all__ = ["TcpPlace", "open_tcp", "tcp_place"]

FIRST_DELAY_S: Final = 0.01
LONGEST_DELAY_S: Final = 0.5
LONGEST_ELASTIC_DELAY_S: Final = 0.1
REACH_LIMIT_S: Final = 5.0
"""The longest attempt to connect: the next attempt finds a host that is back sooner."""
SETTLE_S: Final = 0.5
"""How long the first worker in a store waits for those of an earlier store there, which retry more often."""
HANGUP_LIMIT_S: Final = 0.2
BACKLOG: Final = 2048


@dataclass(frozen=True, slots=True)
class TcpPlace:
    """The address of a store, or of one to be served; port 0 lets the system choose one."""

    host: str
    port: int
    use_libuv: bool

    def __str__(self) -> str:
        return tcp_address(self.host, self.port)


def tcp_place(url: SplitResult, query: Mapping[str, str]) -> TcpPlace:
    """Return the place in ``tcp://host:port``, or in the environment for ``env://``. Raises `ConfigurationError`."""
    use_libuv = query.get("use_libuv", os.environ.get("USE_LIBUV", "1")) == "1"
    if url.scheme == "env":
        return TcpPlace(_variable("MASTER_ADDR"), _port(_variable("MASTER_PORT"), "MASTER_PORT"), use_libuv)
    if url.scheme != "tcp":
        raise ConfigurationError(f"init_method {url.geturl()!r} is none of env://, tcp://host:port and file:///path")
    host, _, port = url.netloc.rpartition(":")
    if not host or not port:
        raise ConfigurationError(f"init_method {url.geturl()!r} must name a host and a port: tcp://host:port")
    return TcpPlace(host.strip("[]"), _port(port, f"the port of {url.geturl()!r}"), use_libuv)


def _variable(name: str) -> str:
    text = variable(name)
    if not text:
        raise ConfigurationError(
            f"init_method 'env://' needs the environment variable {name}, which is not set "
            "(arpc launch and torchrun set it; tcp://host:port and file:///path do without)"
        )
    return text


def _port(text: str, source: str) -> int:
    port = whole_number(text, source)
    if not 0 <= port < 1 << 16:
        raise ConfigurationError(f"{source} must be between 0 and 65535, not {port}")
    return port


def _is_served_by_torchrun(place: TcpPlace) -> bool:
    # torchrun serves a store at the master's address; tcp:// may name another one
    agent = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and agent == (place.host, str(place.port))


_Hosting = Literal["always", "if free", "if here"]
"""When a worker serves the store: in any case, if no other does, or if none does and the address is its own."""


async def open_tcp(place: TcpPlace, *, rank: int | None, world_size: int | None, deadline: float) -> GroupStore:
    """Serve the store or connect to it, depending on the rank, the kind of group and the address."""
    thread = StoreThread()
    first, again = _hosting(place, rank, is_elastic=world_size is None)
    # A store of a group of fixed size that this worker serves cannot be lost
    reopen = None if first == "always" else partial(_open, thread, place, hosting=again)
    try:
        key_values = await _open(thread, place, deadline, hosting=first)
        return GroupStore(key_values, rank=rank, world_size=world_size, thread=thread, reopen=reopen)
    except BaseException:
        # also when cancelled: a store that torch still makes is dropped in the thread, which then ends
        await thread.aclose()
        raise


def _hosting(place: TcpPlace, rank: int | None, *, is_elastic: bool) -> tuple[_Hosting | None, _Hosting | None]:
    """Return when a worker serves the store, as it joins and after the store was lost; None: never."""
    first: _Hosting | None = None
    again: _Hosting | None = None
    if not _is_served_by_torchrun(place):
        # An elastic group outlives its store's host: another worker may serve a store already, or one has to do so
        again = "if here" if is_elastic else None
        if rank == 0:
            first = "if free" if is_elastic else "always"
        elif rank is None:
            first = again
    if place.port == 0 and first is None:
        raise ConfigurationError(f"{place} has port 0, which only the host of the store can ask for")
    return first, again


def _host(place: TcpPlace, hosting: _Hosting) -> KeyValues | None:
    """Serve a store; None if another process is to do so. Raises `RendezvousError` if this machine cannot serve it."""
    if hosting == "if here" and not _is_here(place.host):
        if place.port == 0:
            raise ConfigurationError(f"{place} has port 0, but {place.host} is not this machine")
        return None
    try:
        listener = _listen(place)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise _cannot_host(place, error) from error
        if hosting != "always":
            return None
        listener = None
    port = place.port if listener is None else listener.getsockname()[1]
    close_port_in_children(port)
    try:
        store = TCPStore(
            _loopback(place.host) or "127.0.0.1",  # the host name that other workers use may not resolve here yet
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,  # with no listener, torch shares the server that this process has at the port
            master_listen_fd=None if listener is None else listener.detach(),
            use_libuv=place.use_libuv,
        )
    except DistError as error:
        leave_port_to_children(port)
        raise _cannot_host(place, error) from error
    settle_s = SETTLE_S if place.port and hosting != "always" else 0.0
    access = Access(str(replace(place, port=port)), place.host, port, is_host=True, settle_s=settle_s)
    return KeyValues(store, access, partial(leave_port_to_children, port))


def _is_here(host: str) -> bool:
    """Whether the host is this machine, that is, whether its address can be bound."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False  # the attempt to connect reports the problem
    for family, kind, _, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as bound:
            bound.bind(address)
            return True
    return False


def _loopback(host: str) -> str | None:
    """Return the loopback address that a host stands for; None if it can stand for another one."""
    if host == "localhost":
        return "127.0.0.1"
    return host if is_loopback(host) else None


def _listen(place: TcpPlace) -> socket.socket:
    """Listen where the other workers connect. Torch would listen on all interfaces, even for a group on loopback."""
    loopback = _loopback(place.host)
    if loopback is not None:
        family = socket.AF_INET6 if ":" in loopback else socket.AF_INET
        return socket.create_server((loopback, place.port), family=family, backlog=BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", place.port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", place.port), backlog=BACKLOG)


def _cannot_host(place: TcpPlace, error: Exception) -> RendezvousError:
    return RendezvousError(
        f"cannot serve the group's store at {place}: {first_line(error)}. "
        "If another process has the port, end that process or choose another port (MASTER_PORT)"
    )


async def _open(thread: StoreThread, place: TcpPlace, deadline: float, *, hosting: _Hosting | None) -> KeyValues:
    """Connect to a store as soon as there is one; before each attempt this worker may serve one itself.

    Raises `RendezvousTimeoutError` at the deadline.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    delay_s = FIRST_DELAY_S
    who, longest_delay_s, settle_s = "rank 0", LONGEST_DELAY_S, 0.0
    if hosting is not None:
        who, longest_delay_s, settle_s = "a worker of the group", LONGEST_ELASTIC_DELAY_S, SETTLE_S
    access = Access(str(place), place.host, place.port, settle_s=settle_s)
    while True:
        if hosting is not None and (hosted := await thread.run(partial(_host, place, hosting), limit_s=None)):
            return hosted
        try:
            found = await _connect_once(thread, place, access, deadline - loop.time())
            if found is not None:
                return found
            problem = "the worker that hosts it is leaving"
            await _wait_for_its_end(place)
        except (OSError, DistError, RendezvousError) as error:
            problem = first_line(error)
        if loop.time() + delay_s >= deadline:
            raise RendezvousTimeoutError(
                f"no store at {place} within {loop.time() - started:.3g} s: {problem}. "
                f"Is {who} running there, and do all workers have the same host and port?"
            )
        await asyncio.sleep(delay_s)
        delay_s = min(delay_s * 1.5, longest_delay_s)


async def _connect_once(thread: StoreThread, place: TcpPlace, access: Access, remaining_s: float) -> KeyValues | None:
    """Try to connect once; returns None if the store is closing, raises if there is none (yet, or any more)."""
    limit_s = None if remaining_s == float("inf") else max(remaining_s, 0.1)
    try:
        async with asyncio.timeout(min(limit_s or REACH_LIMIT_S, REACH_LIMIT_S)):
            address = await _reach(place)
    except TimeoutError:
        raise OSError("the host does not answer") from None
    entered: list[KeyValues] = []

    def enter() -> None:
        # await hazard: the server answered, but may be gone by now
        timeout = timedelta(seconds=min(limit_s or 60.0, 60.0))
        store = TCPStore(address, place.port, is_master=False, timeout=timeout, wait_for_workers=False)
        key_values = KeyValues(store, access)
        if key_values.enter():
            entered.append(key_values)

    def leave() -> None:
        while entered:
            entered.pop().release()

    try:
        await thread.run(enter, limit_s=limit_s)
    except (TimeoutError, asyncio.CancelledError) as error:
        thread.submit_nowait(leave)  # the host must not wait for a guest that has given up
        if isinstance(error, TimeoutError):
            raise OSError("something listens there, but does not answer as a store") from None
        raise
    return entered.pop() if entered else None


async def _wait_for_its_end(place: TcpPlace) -> None:
    """Wait briefly for the server to close a connection. Torch would print an error for its client."""
    async with _connection(place) as (reader, _):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HANGUP_LIMIT_S):
                await reader.read()


async def _reach(place: TcpPlace) -> str:
    """Connect and disconnect; returns the address that answered."""
    async with _connection(place) as (_, writer):
        address: str = writer.get_extra_info("peername")[0]
        return address


@contextlib.asynccontextmanager
async def _connection(place: TcpPlace) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(place.host, place.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
