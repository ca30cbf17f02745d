"""Opens the store of a group: ``env://``, ``tcp://host:port``, ``file:///path``, or a ready store.

Connecting is tried from the loop before torch is asked to: a connect inside torch can be neither cancelled nor trusted
to end, and prints what it meets. Torch gets an address that has just answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, parse_qsl, urlsplit

from torch.distributed import DistError, FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # torch says no __all__

from arpc.agent.group_store import Access, GroupStore, KeyValues, StoreThread, deadline_after
from arpc.errors import ConfigurationError, RendezvousError, RendezvousTimeoutError
from arpc.ids import MAX_WORKER_ID
from arpc.options import UNSET, Unset

__all__ = ["Access", "GroupStore", "KeyValues", "open_store"]

FIRST_DELAY_S: Final = 0.01
LONGEST_DELAY_S: Final = 0.5
BACKLOG: Final = 2048


async def open_store(
    *,
    init_method: str = "env://",
    store: Store | None = None,
    rank: int | None = None,
    world_size: int | Unset | None = UNSET,
    timeout_s: float = 60.0,
) -> GroupStore:
    """Open a store, or wrap a ready one, and find out this worker's place in the group.

    A rank or size that is not given comes from the query of `init_method` (``tcp://host:port?rank=0&world_size=2``) or
    from ``RANK`` and ``WORLD_SIZE``. ``world_size=None`` says that the group is elastic.

    Over TCP, rank 0 serves the store, unless torchrun does. An elastic worker of no rank serves it if the address is of
    this machine and the port is free. A ``timeout_s`` of 0 means no limit.

    Raises `ConfigurationError` for what cannot work, `RendezvousTimeoutError` if the store cannot be reached in time.
    """
    url = urlsplit(init_method)
    query = dict(parse_qsl(url.query))
    own_rank, size = _place_in_group(rank, world_size, query)
    if store is not None:
        if not isinstance(store, Store):
            raise ConfigurationError(f"store must be a torch.distributed.Store, not {type(store).__name__}")
        return GroupStore(store, _access_to(store), rank=own_rank, world_size=size)
    if url.scheme == "file":
        return await _open_file(url, own_rank, size)
    place = _tcp_place(url, query)
    role = _tcp_role(place, url.scheme, own_rank, size)
    return await _open_tcp(place, role, own_rank, size, deadline_after(timeout_s))


def _access_to(store: Store) -> Access:
    """What a ready store tells about where it is. Whoever made it keeps it alive, so we are not its host."""
    description = type(store).__name__
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return Access(f"{description} at {store.host}:{store.port}", store.host, store.port)
    return Access(description)


# -- who we are -------------------------------------------------------------------------------------------------------


def _place_in_group(
    rank: int | None, world_size: int | Unset | None, query: Mapping[str, str]
) -> tuple[int | None, int | None]:
    own_rank = _number("rank", UNSET if rank is None else rank, query)
    if world_size is None:
        if "world_size" in query:
            raise ConfigurationError("world_size=None asks for an elastic group, but init_method has a world_size")
        if own_rank is not None and not 0 <= own_rank <= MAX_WORKER_ID:
            raise ConfigurationError(f"rank must be between 0 and {MAX_WORKER_ID}, not {own_rank}")
        return own_rank, None
    size = _number("world_size", world_size, query)
    if size is None:
        raise ConfigurationError(
            "world_size is missing: pass world_size=, or set WORLD_SIZE; world_size=None makes an elastic group"
        )
    if not 1 <= size <= MAX_WORKER_ID + 1:
        raise ConfigurationError(f"world_size must be between 1 and {MAX_WORKER_ID + 1}, not {size}")
    if own_rank is None:
        raise ConfigurationError("rank is missing: pass rank=, or set RANK")
    if not 0 <= own_rank < size:
        raise ConfigurationError(f"rank must be between 0 and {size - 1} in a group of {size}, not {own_rank}")
    return own_rank, size


def _number(name: str, given: int | Unset, query: Mapping[str, str]) -> int | None:
    """What was passed, else what the address says, else the environment."""
    if not isinstance(given, Unset):
        if isinstance(given, bool) or not isinstance(given, int):
            raise ConfigurationError(f"{name} must be a whole number, not {given!r}")
        if name in query and query[name] != str(given):
            raise ConfigurationError(f"{name} is {given}, but init_method says {name}={query[name]}")
        return given
    text, source = query.get(name), f"{name} in init_method"
    if text is None:
        text, source = os.environ.get(name.upper()) or None, f"environment variable {name.upper()}"
    return None if text is None else _to_int(text, source)


def _to_int(text: str, source: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{source} must be a whole number, not {text!r}") from None


# -- file:// ----------------------------------------------------------------------------------------------------------


async def _open_file(url: SplitResult, rank: int | None, world_size: int | None) -> GroupStore:
    if url.netloc or not url.path:
        raise ConfigurationError(f"init_method {url.geturl()!r} has no absolute path: write file:///path")
    path = Path(url.path)
    thread = StoreThread()
    try:
        # with the size, the last of the group removes the file
        make = partial(FileStore, str(path)) if world_size is None else partial(FileStore, str(path), world_size)
        await thread.run(partial(_check_directory, path), limit_s=None)
        store = await thread.run(make, limit_s=None)
        return GroupStore(store, Access(f"file://{path}"), rank=rank, world_size=world_size, thread=thread)
    except BaseException:
        await thread.aclose(_nothing)
        raise


def _check_directory(path: Path) -> None:
    if not path.parent.is_dir():
        raise ConfigurationError(f"init_method file://{path}: there is no directory {path.parent}")
    if path.is_dir():
        raise ConfigurationError(f"init_method file://{path} is a directory: name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigurationError(f"init_method file://{path} cannot be written")


def _nothing() -> None:
    """All that is left to do for a thread that has no store."""


# -- tcp:// and env:// ------------------------------------------------------------------------------------------------


class _Role(enum.Enum):
    HOST = enum.auto()
    CLIENT = enum.auto()
    WHOEVER_COMES_FIRST = enum.auto()


@dataclass(frozen=True, slots=True)
class _TcpPlace:
    host: str
    port: int
    use_libuv: bool

    def __str__(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


def _tcp_place(url: SplitResult, query: Mapping[str, str]) -> _TcpPlace:
    use_libuv = query.get("use_libuv", os.environ.get("USE_LIBUV", "1")) == "1"
    if url.scheme == "env":
        return _TcpPlace(_variable("MASTER_ADDR"), _port(_variable("MASTER_PORT"), "MASTER_PORT"), use_libuv)
    if url.scheme != "tcp":
        raise ConfigurationError(f"init_method {url.geturl()!r} is none of env://, tcp://host:port and file:///path")
    host, _, port = url.netloc.rpartition(":")
    if not host or not port:
        raise ConfigurationError(f"init_method {url.geturl()!r} must name a host and a port: tcp://host:port")
    return _TcpPlace(host.strip("[]"), _port(port, f"the port of {url.geturl()!r}"), use_libuv)


def _variable(name: str) -> str:
    text = os.environ.get(name)
    if not text:
        raise ConfigurationError(
            f"init_method 'env://' needs the environment variable {name}, which is not set "
            "(torchrun sets it; tcp://host:port and file:///path do without)"
        )
    return text


def _port(text: str, source: str) -> int:
    port = _to_int(text, source)
    if not 0 <= port < 1 << 16:
        raise ConfigurationError(f"{source} must be between 0 and 65535, not {port}")
    return port


def _tcp_role(place: _TcpPlace, scheme: str, rank: int | None, world_size: int | None) -> _Role:
    role = _Role.HOST if rank == 0 else _Role.CLIENT
    if rank is None and world_size is None:
        role = _Role.WHOEVER_COMES_FIRST
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun serves a store at the master's address; with tcp:// we may have been given another one
        agent = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
        if scheme == "env" or agent == (place.host, str(place.port)):
            role = _Role.CLIENT
    if role is _Role.CLIENT and place.port == 0:
        raise ConfigurationError(f"{place} has port 0, which only the host of the store can ask for")
    return role


async def _open_tcp(
    place: _TcpPlace, role: _Role, rank: int | None, world_size: int | None, deadline: float
) -> GroupStore:
    thread = StoreThread()
    try:
        if role is _Role.HOST:
            store, access = await thread.run(partial(_host, place), limit_s=None)
            return GroupStore(store, access, rank=rank, world_size=world_size, thread=thread)
        connect = partial(_connect if role is _Role.CLIENT else _host_or_connect, thread, place)
        store, access = await connect(deadline)
        return GroupStore(store, access, rank=rank, world_size=world_size, thread=thread, reopen=connect)
    except BaseException:
        # also when cancelled: a store that torch still makes is dropped in the thread, which then ends
        await thread.aclose(_nothing)
        raise


def _host(place: _TcpPlace) -> tuple[Store, Access]:
    """Serve a store; if this process serves one at that port already (for a process group, say), share it."""
    try:
        listener = _listen(place)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise _cannot_host(place, error) from error
        listener = None
    return _host_with(listener, place)


async def _host_or_connect(thread: StoreThread, place: _TcpPlace, deadline: float) -> tuple[Store, Access]:
    hosted = await thread.run(partial(_host_if_first, place), limit_s=None)
    if hosted is not None:
        return hosted
    if place.port == 0:
        raise ConfigurationError(f"{place} has port 0, but {place.host} is not this machine")
    return await _connect(thread, place, deadline)


def _host_if_first(place: _TcpPlace) -> tuple[Store, Access] | None:
    if not _is_here(place.host):
        return None
    try:
        listener = _listen(place)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise _cannot_host(place, error) from error
        return None
    return _host_with(listener, place)


def _is_here(host: str) -> bool:
    """Whether the host is this machine, which is to say that its address can be bound."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False  # connecting to it will tell what is wrong
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as bound:
                bound.bind(address)
        except OSError:
            continue
        return True
    return False


def _loopback(host: str) -> str | None:
    """The loopback address that a host stands for, if it cannot stand for anything else."""
    if host == "localhost":
        return "127.0.0.1"
    try:
        return host if ipaddress.ip_address(host).is_loopback else None
    except ValueError:
        return None  # a name: it may lead to loopback here, and here from elsewhere


def _listen(place: _TcpPlace) -> socket.socket:
    """Listen where the others will look. Torch would always listen on all interfaces, for a group on loopback too."""
    loopback = _loopback(place.host)
    if loopback is not None:
        family = socket.AF_INET6 if ":" in loopback else socket.AF_INET
        return socket.create_server((loopback, place.port), family=family, backlog=BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", place.port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", place.port), backlog=BACKLOG)


def _host_with(listener: socket.socket | None, place: _TcpPlace) -> tuple[Store, Access]:
    loopback = _loopback(place.host)
    port = place.port if listener is None else listener.getsockname()[1]
    try:
        store = TCPStore(
            loopback or "127.0.0.1",  # the name that others know this host by may not lead here yet
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,  # with no listener, a server that this process has at the port is shared
            master_listen_fd=None if listener is None else listener.detach(),
            use_libuv=place.use_libuv,
        )
    except DistError as error:
        raise _cannot_host(place, error) from error
    address = str(replace(place, port=port))
    return store, Access(address, place.host, port, is_host=True)


def _cannot_host(place: _TcpPlace, error: Exception) -> RendezvousError:
    return RendezvousError(
        f"cannot serve the group's store at {place}: {_first_line(error)}. "
        "If another process has the port, end that process or choose another port (MASTER_PORT)"
    )


async def _connect(thread: StoreThread, place: _TcpPlace, deadline: float) -> tuple[Store, Access]:
    """Connect to a store as soon as there is one."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    delay_s = FIRST_DELAY_S
    while True:
        try:
            return await _connect_once(thread, place, deadline - loop.time())
        except (OSError, DistError) as error:
            problem = _first_line(error)
        if loop.time() + delay_s >= deadline:
            raise RendezvousTimeoutError(
                f"no store at {place} within {loop.time() - started:.3g} s: {problem}. "
                "Is rank 0 running there, and do all workers have the same host and port?"
            )
        await asyncio.sleep(delay_s)
        delay_s = min(delay_s * 1.5, LONGEST_DELAY_S)


async def _connect_once(thread: StoreThread, place: _TcpPlace, remaining_s: float) -> tuple[Store, Access]:
    """One attempt; `OSError` or `DistError` if there is nothing yet, or nothing any more."""
    limit_s = None if remaining_s == float("inf") else max(remaining_s, 0.1)
    try:
        async with asyncio.timeout(limit_s):
            address = await _reach(place)
    except TimeoutError:
        raise OSError("the host does not answer") from None
    # await hazard: it answered, but may be gone by the time that torch connects
    connect = partial(
        TCPStore,
        address,
        place.port,
        is_master=False,
        timeout=timedelta(seconds=min(limit_s or 60.0, 60.0)),
        wait_for_workers=False,
    )
    try:
        store = await thread.run(connect, limit_s=limit_s)
    except TimeoutError:
        raise OSError("something listens there, but does not answer as a store") from None
    return store, Access(str(place), place.host, place.port)


async def _reach(place: _TcpPlace) -> str:
    """Connect and hang up; the address that answered."""
    _, writer = await asyncio.open_connection(place.host, place.port)
    try:
        address: str = writer.get_extra_info("peername")[0]
        return address
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _first_line(error: Exception) -> str:
    # what torch appends is a C++ stack
    return str(error).partition("\n")[0] or type(error).__name__
