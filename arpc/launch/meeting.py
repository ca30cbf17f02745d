"""The meeting place of a local group: a store served by the launcher, a secret file, the dashboard's address."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from pathlib import Path
from typing import Any, Final

from arpc.errors import ConfigurationError

__all__ = ["StoreServer", "answers", "choose_http", "write_secret"]

BACKLOG: Final = 4096
HTTP_PORT: Final = 27720
LOOPBACK: Final = "127.0.0.1"


class StoreServer:
    """A torch store on a port that the system chose. The port is bound from the start, so no other process gets it.

    The workers can be started before `serve`, which has to import torch as they do: their connections wait in the
    socket's backlog meanwhile.
    """

    def __init__(self, host: str = LOOPBACK) -> None:
        self._listener: socket.socket | None = socket.create_server((host, 0), backlog=BACKLOG)
        self.host = host
        self.port: int = self._listener.getsockname()[1]
        self._store: Any = None

    async def serve(self) -> None:
        await asyncio.to_thread(self.serve_blocking)

    def serve_blocking(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch defines no __all__

        listener, self._listener = self._listener, None
        assert listener is not None
        self._store = TCPStore(
            self.host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
        )

    async def aclose(self) -> None:
        """Stop serving. Workers that have not ended yet lose their connection to the store."""
        if self._listener is not None:
            self._listener.close()
        await asyncio.to_thread(self._drop)  # joins a thread of torch's

    def _drop(self) -> None:
        self._store = None


def write_secret(directory: Path) -> Path:
    """Write a new secret to a file that only this user can read. Others may read command lines and environments."""
    path = directory / "secret"
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(secrets.token_hex(32))
    return path


def choose_http(wanted: str) -> str:
    """Return the address for the dashboard: ``wanted``, or if that is empty a free address of this machine.

    If ``wanted`` is empty and the usual port is in use, another one is taken. Raises `ConfigurationError` if ``wanted``
    is in use.
    """
    host, _, port = wanted.rpartition(":")
    if wanted and not (host and port.isdecimal()):
        raise ConfigurationError(
            f"the dashboard's address is given as HOST:PORT, such as {LOOPBACK}:{HTTP_PORT}, not {wanted!r}"
        )
    for number in (int(port),) if wanted else (HTTP_PORT, 0):
        try:
            with socket.create_server((host or LOOPBACK, number)) as free:
                return f"{host or LOOPBACK}:{free.getsockname()[1]}"
        except OSError as error:
            problem = error
    raise ConfigurationError(f"the dashboard cannot be at {wanted}: {problem.strerror}")


async def answers(address: str) -> bool:
    """Whether a server accepts connections at ``host:port``."""
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.open_connection(LOOPBACK if host == "0.0.0.0" else host.strip("[]"), int(port))  # noqa: S104
    except OSError:
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True
