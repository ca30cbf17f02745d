"""The sources of a tool's numbers: a worker's own port, or the dashboard of a worker that serves it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from arpc.console.onlooker import Onlooker
from arpc.errors import ArpcError, AuthenticationError, ConfigurationError, WireError
from arpc.http.guard import derive_token
from arpc.metrics.attach import Attachable, attachable
from arpc.metrics.limits import MAX_TRACE_S
from arpc.metrics.stacks import WorkerStack
from arpc.metrics.summary import GroupSummary
from arpc.options import RpcOptions

__all__ = ["Attachment", "attach", "choose"]

_COLLECT_S: Final = 60.0
"""How long it may take to collect the parts of a trace."""
_decode_summary = msgspec.msgpack.Decoder(GroupSummary).decode
_decode_stacks = msgspec.msgpack.Decoder(list[WorkerStack]).decode
_summary_of_json = msgspec.json.Decoder(GroupSummary).decode
_stacks_of_json = msgspec.json.Decoder(list[WorkerStack]).decode


class Attachment(Protocol):
    """A group that a tool is attached to."""

    async def summary(self) -> GroupSummary: ...
    async def stacks(self) -> list[WorkerStack]: ...
    async def trace(self, seconds: float, form: str) -> bytes: ...


class _ByPort:
    def __init__(self, onlooker: Onlooker) -> None:
        self._onlooker = onlooker

    async def summary(self) -> GroupSummary:
        return _decode_summary(await self._onlooker.ask("group", 1.0))

    async def stacks(self) -> list[WorkerStack]:
        return _decode_stacks(await self._onlooker.ask("group_stack", 2.0))

    async def trace(self, seconds: float, form: str) -> bytes:
        return await self._onlooker.ask("group_trace", seconds, form, timeout_s=seconds + _COLLECT_S)


class _ByPage:
    def __init__(self, session: Any, url: str) -> None:
        self._session = session
        self._url = url.rstrip("/")

    async def _get(self, path: str, method: str = "GET") -> bytes:
        async with self._session.request(method, f"{self._url}{path}") as response:
            body: bytes = await response.read()
            if response.status == 401:
                raise AuthenticationError(f"{self._url} does not take this secret: set ARPC_SECRET, or --secret-file")
            if response.status != 200:
                raise WireError(f"{self._url}{path} answered {response.status}: {body[:200].decode(errors='replace')}")
            return body

    async def summary(self) -> GroupSummary:
        return _summary_of_json(await self._get("/api/group"))

    async def stacks(self) -> list[WorkerStack]:
        return _stacks_of_json(await self._get("/api/stack"))

    async def trace(self, seconds: float, form: str) -> bytes:
        return await self._get(f"/api/trace?seconds={seconds:g}&form={form}", "POST")


def choose(workers: list[Attachable], name: str | None, pid: int | None) -> Attachable:
    """Return the worker to ask: the newest that matches. Raises `ConfigurationError` if none does."""
    fitting = [one for one in workers if (name is None or one.name == name) and (pid is None or one.pid == pid)]
    if fitting:
        return fitting[0]
    if not workers:
        raise ConfigurationError("no worker of this user runs on this host: start a group, or give --address")
    known = ", ".join(f"{one.name} (process {one.pid})" for one in workers[:16])
    raise ConfigurationError(f"no such worker on this host; there are {known}")


def several(taken: Attachable, groups: int) -> str:
    """Return the notice for a user who did not name one of several groups."""
    return (
        f"{groups} groups run on this host. This is the newest, of worker {taken.name!r} (process {taken.pid}), which "
        f"met at {taken.group}: `arpc ps` lists them all, and --worker or --pid chooses another"
    )


@asynccontextmanager
async def attach(arguments: argparse.Namespace) -> AsyncIterator[Attachment]:
    """Attach to the group that the arguments name."""
    address: str | None = arguments.address
    secret_file: Path | None = arguments.secret_file
    options = RpcOptions()
    if address is None:
        workers = attachable()
        found = choose(workers, arguments.worker, arguments.pid)
        groups = len({one.group for one in workers})
        if groups > 1 and arguments.worker is None and arguments.pid is None:
            sys.stderr.write(several(found, groups) + "\n")
        address = min(found.addresses, key=lambda one: not one.startswith("unix://"))
        if secret_file is None and options.secret is None and found.secret_file is not None:
            secret_file = Path(found.secret_file)
    if secret_file is not None:
        options = options.replace(secret=_read_secret(secret_file))
    if address.startswith(("http://", "https://")):
        import aiohttp  # slow, and most tools attach to a worker's port

        headers = {} if options.secret is None else {"Authorization": f"Bearer {derive_token(options.secret)}"}
        timeout = aiohttp.ClientTimeout(total=MAX_TRACE_S + _COLLECT_S)
        try:
            async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
                yield _ByPage(session, address)
        except aiohttp.ClientError as error:
            raise WireError(f"{address} cannot be reached: {error}") from error
        return
    try:
        async with Onlooker(address, options) as onlooker:
            yield _ByPort(onlooker)
    except OSError as error:
        if isinstance(error, ArpcError):
            raise
        raise WireError(f"{address} cannot be reached: {error}") from error


def _read_secret(path: Path) -> bytes:
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigurationError(f"the secret in {path} cannot be read: {error.strerror or error}") from error
    if not secret:
        raise ConfigurationError(f"the secret in {path} is empty")
    return secret
