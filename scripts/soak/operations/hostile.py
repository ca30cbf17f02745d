"""Exceptions that raise when they are pickled or formatted: the caller gets an error, and the worker goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NoReturn

import arpc
from scripts.soak.operations.base import TIMEOUT_S, Client, Operation, here, raises

__all__ = ["OPERATIONS"]


class UnpicklableError(Exception):
    """Cannot be pickled."""

    def __reduce__(self) -> NoReturn:
        raise RuntimeError("__reduce__ raised")


class UnprintableError(Exception):
    """Cannot be formatted."""

    def __str__(self) -> str:
        raise RuntimeError("__str__ raised")

    __repr__ = __str__


class UnusableError(UnpicklableError, UnprintableError):
    """Can neither be pickled nor formatted, and its methods end the interpreter instead of raising an error."""

    def __reduce__(self) -> NoReturn:
        raise SystemExit("__reduce__ raised")


_ERRORS = (UnpicklableError, UnprintableError, UnusableError)


async def fail(token: str, kind: int) -> None:
    here().ledger.ran(token)
    raise _ERRORS[kind]


def fail_in_thread(token: str, kind: int) -> None:
    here().ledger.ran(token)
    raise _ERRORS[kind]


@arpc.inline
def fail_inline(token: str, kind: int) -> None:
    here().ledger.ran(token)
    raise _ERRORS[kind]


@arpc.batched(max_size=8, max_wait_ms=4)
async def fail_in_batch(tokens: list[str], kinds: list[int]) -> list[Exception]:
    for token in tokens:
        here().ledger.ran(token)
    return [_ERRORS[kind]() for kind in kinds]


@arpc.batched(max_size=8, max_wait_ms=4)
def fail_whole_batch(tokens: list[str], kinds: list[int]) -> NoReturn:
    for token in tokens:
        here().ledger.ran(token)
    raise _ERRORS[kinds[0]]


async def fail_in_stream(token: str, kind: int) -> AsyncIterator[int]:
    here().ledger.ran(token)
    yield kind
    raise _ERRORS[kind]


async def _fail(client: Client) -> None:
    to, kind = client.other(), client.random.randrange(len(_ERRORS))
    function: Any = client.random.choice((fail, fail_in_thread, fail_inline))
    async with client.call("hostile", to) as token:
        await raises(client.worker.rpc_sync(to, function, args=(token, kind), timeout=TIMEOUT_S), Exception)


async def _fail_in_batch(client: Client) -> None:
    to, kind = client.other(), client.random.randrange(len(_ERRORS))
    function: Any = client.random.choice((fail_in_batch, fail_whole_batch))
    async with client.call("hostile-batched", to) as token:
        await raises(client.worker.rpc_sync(to, function, args=(token, kind), timeout=TIMEOUT_S), Exception)


async def _fail_in_stream(client: Client) -> None:
    to, kind = client.other(), client.random.randrange(len(_ERRORS))

    async def read() -> list[int]:
        return [item async for item in client.worker.stream(to, fail_in_stream, args=(token, kind), timeout=TIMEOUT_S)]

    async with client.call("hostile-stream", to) as token:
        await raises(read(), Exception)


async def _fail_to_create(client: Client) -> None:
    to, kind = client.other(), client.random.randrange(len(_ERRORS))
    async with client.call("hostile-remote", to) as token:
        rref = client.worker.remote(to, fail, args=(token, kind), timeout=TIMEOUT_S)
        await raises(rref.to_here(), Exception)


OPERATIONS = (
    Operation("hostile", _fail, pause_s=0.3),
    Operation("hostile-batched", _fail_in_batch, pause_s=2.0),
    Operation("hostile-stream", _fail_in_stream, pause_s=0.5),
    Operation("hostile-remote", _fail_to_create, pause_s=0.5),
)
