"""What workers do all the time: they call, stream, train and pass RRefs around, and check every answer."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import torch

import arpc
from arpc.runtime import current
from scripts.soak.ledger import Ledger

__all__ = ["Load", "keep_books"]

_TIMEOUT_S = 12.0
_PAUSE_S = 0.02
_books: list[Ledger] = []


def keep_books(ledger: Ledger) -> None:
    """The books of this process, for the functions that others call here."""
    _books[:] = [ledger]


def _ledger() -> Ledger:
    return _books[0]


# -- what is called


async def answer(token: str, value: Any) -> Any:
    _ledger().ran(token)
    return value


def answer_in_thread(token: str, value: Any) -> Any:
    _ledger().ran(token)
    return value


async def answer_late(token: str, seconds: float) -> float:
    _ledger().ran(token)
    await asyncio.sleep(seconds)
    return seconds


async def count(token: str, items: int) -> AsyncIterator[int]:
    _ledger().ran(token)
    for number in range(items):
        yield number


async def scaled(token: str, x: torch.Tensor, factor: float) -> torch.Tensor:
    _ledger().ran(token)
    return x * factor


class Total:
    """An object to be held from afar."""

    def __init__(self, token: str) -> None:
        _ledger().ran(token)
        self.value = 0

    async def add(self, token: str, number: int) -> int:
        _ledger().ran(token)
        self.value += number
        return self.value


async def add_for(token: str, total: arpc.RRef[Total], number: int) -> int:
    """Add to an object of a third worker, whose RRef came along."""
    ledger = _ledger()
    ledger.ran(token)
    with ledger.call("rref use", total.owner_name()) as inner:
        result: int = await total.rpc_sync().add(inner, number)
    return result


# -- what is done


class Load:
    """The doings of one worker."""

    def __init__(self, worker: arpc.Worker, ledger: Ledger, seed: str) -> None:
        self._worker = worker
        self._ledger = ledger
        self._dice = random.Random(seed)
        self._others: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self.is_over = False

    def start(self, each: int) -> None:
        """Begin; ``each``: how many tasks do each thing."""
        self._tasks.append(asyncio.create_task(self._follow_members()))
        for do in (self._call, self._call, self._stream, self._train, self._pass_rrefs):
            self._tasks += [asyncio.create_task(self._repeat(do)) for _ in range(each)]

    async def stop(self) -> None:
        """Let everything that was begun come to its end."""
        self.is_over = True
        self._tasks[0].cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cancel(self) -> None:
        """End at once."""
        self.is_over = True
        for task in self._tasks:
            task.cancel()

    async def _follow_members(self) -> None:
        """Whom to call: all that are there, and now and then one that is not."""
        async for event in self._worker.membership():
            if isinstance(event, arpc.MemberLeft):
                self._others.discard(event.worker.name)
            elif event.worker.name != "director":
                self._others.add(event.worker.name)

    async def _repeat(self, do: Callable[[], Awaitable[None]]) -> None:
        while not self.is_over:
            if self._others:
                try:
                    await do()
                except (arpc.ArpcError, OSError):
                    pass  # it is in the books
                except AssertionError as error:
                    self._ledger.wrong(f"{self._worker.name}: {error!r}")
            await asyncio.sleep(_PAUSE_S * self._dice.random())

    def _other(self) -> str:
        return self._dice.choice(sorted(self._others))

    async def _call(self) -> None:
        to = self._other()
        way = self._dice.randrange(6)
        if way == 0:
            value = torch.full((self._dice.choice((10, 20_000, 300_000)),), float(self._dice.randrange(100)))
            with self._ledger.call("call tensor", to) as token:
                got = await self._worker.rpc_sync(to, answer, args=(token, value), timeout=_TIMEOUT_S)
            assert torch.equal(got, value), "another tensor came back"
        elif way == 1:
            with self._ledger.call("call cancelled", to) as token:
                call = asyncio.ensure_future(self._worker.rpc_sync(to, answer_late, args=(token, 0.05)))
                await asyncio.wait([call], timeout=0.06 * self._dice.random())
                call.cancel()
                await asyncio.wait([call])
                if call.cancelled():
                    raise arpc.CallCancelledError("by its caller")
                call.result()
        elif way == 2:
            with self._ledger.call("call short", to) as token:
                timeout_s = 0.01 + 0.1 * self._dice.random()
                await self._worker.rpc_sync(to, answer_late, args=(token, 0.05), timeout=timeout_s)
        else:
            function = answer_in_thread if way == 3 else answer
            number = self._dice.randrange(1000)
            with self._ledger.call("call", to) as token:
                got = await self._worker.rpc_sync(to, function, args=(token, number), timeout=_TIMEOUT_S)
            assert got == number, "another number came back"

    async def _stream(self) -> None:
        to = self._other()
        items = self._dice.randrange(200)
        leave_at = self._dice.randrange(400)
        with self._ledger.call("stream", to) as token:
            expected = 0
            async for number in self._worker.stream(to, count, args=(token, items), timeout=_TIMEOUT_S):
                assert number == expected, f"item {number} came in the place of {expected}"
                expected += 1
                if expected == leave_at:
                    break
            else:
                assert expected == items, f"{expected} of {items} items came"

    async def _train(self) -> None:
        first, second = self._other(), self._other()
        factors = self._dice.uniform(0.5, 2), self._dice.uniform(0.5, 2)
        x = torch.rand(64, requires_grad=True)
        async with arpc.autograd.context() as context_id:
            y = x
            for to, factor in zip((first, second), factors, strict=True):
                with self._ledger.call("train forward", to) as token:
                    y = await self._worker.rpc_sync(to, scaled, args=(token, y, factor), timeout=_TIMEOUT_S)
            await arpc.autograd.backward(context_id, [y.sum()])
            gradient = arpc.autograd.get_gradients(context_id)[x]
        expected = torch.full_like(x, factors[0] * factors[1])
        assert torch.allclose(gradient, expected), "a gradient is wrong"

    async def _pass_rrefs(self) -> None:
        owner, helper = self._other(), self._other()
        expected = 0
        with self._ledger.call("rref create", owner) as token:
            total = self._worker.remote(owner, Total, args=(token,), timeout=_TIMEOUT_S)
            created = total._get_future()  # noqa: SLF001 - torch's name for it
            assert created is not None
            await created
        for number in range(1, 4):
            with self._ledger.call("rref use", owner) as token:
                got = await total.rpc_sync().add(token, number)
            expected += number
            assert got == expected, f"{got} instead of {expected}: the object was lost, or is another one"
            with self._ledger.call("rref pass", helper) as token:
                got = await self._worker.rpc_sync(helper, add_for, args=(token, total, 1), timeout=_TIMEOUT_S)
            expected += 1
            assert got == expected, f"{got} instead of {expected} after a use by {helper}"


async def status() -> dict[str, Any]:
    """What a worker has left, once its load is over."""
    gc.collect()  # an error that is kept, by a future for one, keeps the frames of whoever it was raised in
    worker = current()
    statistics = worker.statistics()
    rrefs = worker.rref_context
    return {
        "rrefs": [str(row) for row in worker.rrefs()],
        "values": len(rrefs.values),
        "offers": len(rrefs.forks.offers),
        "contexts": [
            f"of {context.creator}, known to {sorted(context.known_workers)}, {len(context.sends)} sends, "
            f"{len(context.recvs)} recvs"
            for context in worker.autograd.container.contexts.values()
        ],
        "calls": {name: peer["calls_in_flight"] for name, peer in statistics["peers"].items() if name != "director"},
        "shared_memory": statistics["shared_memory"],
    }
