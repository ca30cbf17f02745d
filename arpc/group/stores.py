"""Opens the store of a group: ``env://``, ``tcp://host:port``, ``file:///path``, or a ready store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, urlsplit

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # torch says no __all__

from arpc.errors import ConfigurationError
from arpc.group.group_store import Access, GroupStore, KeyValues, StoreThread, deadline_after
from arpc.group.launch_env import variable, whole_number
from arpc.group.tcp_stores import open_tcp, tcp_place
from arpc.ids import MAX_WORKER_ID
from arpc.options import UNSET, Unset

__all__ = ["GroupStore", "open_store"]


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
    from ``RANK`` and ``WORLD_SIZE``, or Slurm's variables for them. ``world_size=None`` makes an elastic group.

    Over TCP, rank 0 serves the store, unless torchrun does. An elastic worker with no rank serves it if the address is
    this machine's and the port is free. A ``timeout_s`` of 0 means no limit.

    Raises `ConfigurationError` for settings that cannot work, `RendezvousTimeoutError` if the store cannot be reached
    in time, and `RendezvousError` if this worker has to serve it and cannot.
    """
    url = urlsplit(init_method)
    query = dict(parse_qsl(url.query))
    own_rank, size = _place_in_group(rank, world_size, query)
    if store is not None:
        if not isinstance(store, Store):
            raise ConfigurationError(f"store must be a torch.distributed.Store, not {type(store).__name__}")
        return GroupStore(KeyValues(store, _access_to(store)), rank=own_rank, world_size=size)
    if url.scheme == "file":
        return await _open_file(url, own_rank, size)
    place = tcp_place(url, query)
    return await open_tcp(place, rank=own_rank, world_size=size, deadline=deadline_after(timeout_s))


def _access_to(store: Store) -> Access:
    """Return the location of a ready store. The user keeps it alive, so this worker is not its host."""
    description = type(store).__name__
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return Access(f"{description} at {store.host}:{store.port}", store.host, store.port)
    return Access(description)


# -- rank and size ----------------------------------------------------------------------------------------------------


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
    """Return the value that was passed, else the one in the address, else the one in the environment."""
    if not isinstance(given, Unset):
        if isinstance(given, bool) or not isinstance(given, int):
            raise ConfigurationError(f"{name} must be a whole number, not {given!r}")
        if name in query and query[name] != str(given):
            raise ConfigurationError(f"{name} is {given}, but init_method says {name}={query[name]}")
        return given
    text, source = query.get(name), f"{name} in init_method"
    if text is None:
        text, source = variable(name.upper()), f"environment variable {name.upper()}"
    return None if text is None else whole_number(text, source)


# -- file:// ----------------------------------------------------------------------------------------------------------


async def _open_file(url: SplitResult, rank: int | None, world_size: int | None) -> GroupStore:
    if url.netloc or not url.path:
        raise ConfigurationError(f"init_method {url.geturl()!r} has no absolute path: write file:///path")
    path = Path(url.path)
    thread = StoreThread()
    try:
        # with the size, the last worker of the group removes the file
        make = partial(FileStore, str(path)) if world_size is None else partial(FileStore, str(path), world_size)
        await thread.run(partial(_check_directory, path), limit_s=None)
        store = await thread.run(make, limit_s=None)
        key_values = KeyValues(store, Access(f"file://{path}"))
        return GroupStore(key_values, rank=rank, world_size=world_size, thread=thread)
    except BaseException:
        await thread.aclose()
        raise


def _check_directory(path: Path) -> None:
    if not path.parent.is_dir():
        raise ConfigurationError(f"init_method file://{path}: there is no directory {path.parent}")
    if path.is_dir():
        raise ConfigurationError(f"init_method file://{path} is a directory: name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigurationError(f"init_method file://{path} cannot be written")
