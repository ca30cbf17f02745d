"""Attach files, by which tools find the groups of this host: a small file for each worker, beside its socket.

It has the addresses of the worker, and no secret: if the secret came from a file (``ARPC_SECRET_FILE``, as
`arpc launch` sets it), it only names that file, which only the same user can read.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from arpc.errors import ConfigurationError, WireError
from arpc.ids import WorkerInfo
from arpc.log import get_logger
from arpc.options import RpcOptions
from arpc.transport.sockets import is_running, socket_directory

__all__ = ["AttachFile", "Attachable", "attachable"]

logger = get_logger("arpc.metrics")

_SUFFIX: Final = ".worker.json"


class Attachable(msgspec.Struct, frozen=True):
    """A worker of this host that tools can attach to."""

    name: str
    id: int
    pid: int
    started_s: float
    addresses: tuple[str, ...]
    http: str | None = None
    secret_file: str | None = None
    group: str = "?"
    """The meeting place of its group, which distinguishes the groups of this host."""


class AttachFile:
    """The attach file of one worker, which exists as long as the worker runs."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def write(
        cls,
        info: WorkerInfo,
        addresses: Iterable[str],
        http: str | None,
        options: RpcOptions,
        now_s: float,
        group: str = "?",
    ) -> AttachFile | None:
        """Write the file. None if that fails, or if no tool could use the addresses: the worker runs without it."""
        reachable = tuple(address for address in addresses if address.startswith(("unix://", "tcp://")))
        if not reachable:
            return None
        # the file does not count if the secret comes from ARPC_SECRET
        named = os.environ.get("ARPC_SECRET_FILE") if not os.environ.get("ARPC_SECRET") else None
        secret_file = named if options.secret is not None else None
        found = Attachable(info.name, info.id, os.getpid(), now_s, reachable, http, secret_file, group)
        try:
            content = msgspec.json.encode(found)
            directory = socket_directory()
            _tidy(directory)
            path = directory / f"{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
        except (OSError, ValueError, WireError, AttributeError) as error:  # JSON needs text, and a path may be none
            logger.debug(
                "tools will not find worker %s by themselves: %s", info.name, error, extra={"worker": info.name}
            )
            return None
        return cls(path)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def attachable() -> list[Attachable]:
    """Return the workers of this user on this host, the newest first. Removes the files of killed processes."""
    try:
        directory = socket_directory()
    except (OSError, WireError, AttributeError) as error:
        raise ConfigurationError(f"the workers of this host cannot be found: {error}. Give --address") from error
    found = []
    for path, one in _files(directory):
        if is_running(one.pid):
            found.append(one)
        else:
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda one: (-one.started_s, one.id))


def _files(directory: Path) -> Iterator[tuple[Path, Attachable]]:
    for path in directory.glob(f"*{_SUFFIX}"):
        try:
            yield path, msgspec.json.decode(path.read_bytes(), type=Attachable)
        except (OSError, msgspec.MsgspecError):
            continue  # it is being written, or was just removed


def _tidy(directory: Path) -> None:
    """Remove the files of workers that were killed: on a host where no tool ever runs, they would accumulate.

    A worker in another PID namespace seems dead from here, but still has its socket.
    """
    for path, one in _files(directory):
        sockets = [address.removeprefix("unix://") for address in one.addresses if address.startswith("unix://")]
        if sockets and not is_running(one.pid) and not any(map(os.path.exists, sockets)):
            path.unlink(missing_ok=True)
