"""Streams that are read to their end, that are left early, and that raise."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from scripts.soak.operations.base import TIMEOUT_S, Client, DeliberateError, Operation, here

__all__ = ["OPERATIONS"]


async def count(token: str, items: int, fails: bool) -> AsyncIterator[int]:
    here().ledger.ran(token)
    for number in range(items):
        yield number
    if fails:
        raise DeliberateError(f"asked to fail after {items} items")


def count_in_thread(token: str, items: int, fails: bool) -> Iterator[int]:
    here().ledger.ran(token)
    yield from range(items)
    if fails:
        raise DeliberateError(f"asked to fail after {items} items")


async def _read(client: Client, kind: str, *, fails: bool) -> None:
    to, items = client.other(), client.random.randrange(100)
    leave_at = 0 if fails else client.random.randrange(200)
    function = client.random.choice((count, count_in_thread))
    async with client.call(kind, to) as token:
        expected, has_raised = 0, False
        stream = client.worker.stream(to, function, args=(token, items, fails), timeout=TIMEOUT_S)
        try:
            async for number in stream:
                assert number == expected, f"item {number} came in the place of {expected}"
                expected += 1
                if expected == leave_at:
                    return
        except DeliberateError:
            has_raised = True
        assert has_raised == fails, f"the stream {'raised' if has_raised else 'did not raise'}"
        assert expected == items, f"{expected} of {items} items came"


async def _stream(client: Client) -> None:
    await _read(client, "stream", fails=False)


async def _stream_raises(client: Client) -> None:
    await _read(client, "stream-raises", fails=True)


OPERATIONS = (Operation("stream", _stream), Operation("stream-raises", _stream_raises))
