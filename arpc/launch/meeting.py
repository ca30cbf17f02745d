"""Where a local group meets: a store that the launcher serves, and a secret in a file that only this user can read."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from pathlib import Path
from typing import Any, Final

__all__ = ["StoreServer", "write_secret"]

BACKLOG: Final = 4096
LOOPBACK: Final = "127.0.0.1"


class StoreServer:
    """A torch store on a port that the system chose. The port is taken from the start, so nobody else gets it.

    The workers can be started before `serve`, which has to import torch as they do: who connects meanwhile waits in
    the socket's queue.
    """

    def __init__(self, host: str = LOOPBACK) -> None:
        self._listener: socket.socket | None = socket.create_server((host, 0), backlog=BACKLOG)
        self.host = host
        self.port: int = self._listener.getsockname()[1]
        self._store: Any = None

    async def serve(self) -> None:
        await asyncio.to_thread(self.serve_blocking)

    def serve_blocking(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch says no __all__

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
        """Serve no longer. The workers have ended, or will find that out."""
        if self._listener is not None:
            self._listener.close()
        await asyncio.to_thread(self._drop)  # joins a thread of torch's

    def _drop(self) -> None:
        self._store = None


def write_secret(directory: Path) -> Path:
    """A fresh secret, in a file that nobody else can read. Command lines and environments can be read by others."""
    path = directory / "secret"
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(secrets.token_hex(32))
    return path
