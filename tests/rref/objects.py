"""What the tests call on other workers."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import torch

import arpc


class Counter:
    def __init__(self, total: int = 0) -> None:
        self.total = total

    def add(self, number: int) -> int:
        self.total += number
        return self.total

    async def add_later(self, number: int) -> int:
        await asyncio.sleep(0)
        return self.add(number)

    def next(self) -> Counter:
        return Counter(self.total + 1)

    def numbers(self, count: int):
        yield from range(count)

    async def numbers_later(self, count: int):
        for number in range(count):
            yield number


class Gate:
    """Lets a test decide when a remote function goes on."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()


gates: dict[str, Gate] = {}


async def pass_gate(name: str, value: object = None) -> object:
    gate = gates[name]
    gate.entered.set()
    try:
        await gate.event.wait()
    except asyncio.CancelledError:
        gate.cancelled.set()
        raise
    return value


def fail(text: str) -> None:
    raise ValueError(text)


def give_back(value: object) -> object:
    return value


def make_local(value: object) -> arpc.RRef[object]:
    return arpc.RRef(value)


async def fetch(rref: arpc.RRef[int]) -> int:
    return await rref


async def fetch_nested(box: dict[str, list[arpc.RRef[int]]]) -> list[int]:
    return [await rref for rref in box["rrefs"]]


def is_confirmed(rref: arpc.RRef[object]) -> bool:
    return rref.confirmed_by_owner()


async def pass_on(rref: arpc.RRef[int], *through: str) -> int:
    """Hand an RRef from user to user."""
    if not through:
        return await rref
    return await arpc.rpc_sync(through[0], pass_on, (rref, *through[1:]))


def count_up(count: int):
    yield from range(count)


async def count_up_later(count: int):
    for number in range(count):
        yield number


def add_remotely_from_a_thread(owner: str, number: int) -> int:
    """A plain function runs in a thread, where it may use RRefs too."""
    rref = arpc.remote(owner, Counter, (number,))
    return rref.rpc_async().add(1).wait(30)


@arpc.inline
def nothing() -> None:
    """Takes no time."""


def keywords(**named: object) -> dict[str, object]:
    return named


async def make_behind_gate(owner: str) -> object:
    return await arpc.remote(owner, pass_gate, ("gate", 5))


def make_script_module() -> torch.jit.ScriptModule:
    return torch.jit.script(torch.nn.Linear(2, 3))


class Rotten:
    """Can be packed, and not unpacked."""

    def __reduce__(self):
        return spoil, ()

    def where(self) -> str:
        return arpc.get_worker_info().name


def spoil() -> None:
    raise LookupError("it has gone bad on the way")


def make_unreadable() -> Rotten:
    return Rotten()


async def make_unreadable_later() -> Rotten:
    return Rotten()


async def give_back_later(value: object, *_: object, **__: object) -> object:
    return value


async def call_add(rref: arpc.RRef[Counter]) -> int:
    return await rref.rpc_sync().add(1)


async def make_number(number: int) -> int:
    return number


async def make_list(number: int) -> list[int]:
    return [number]


def repeat(text: str, count: int) -> str:
    return text * count


async def repeat_later(text: str, count: int) -> str:
    return text * count


async def call_next_twice(rref: arpc.RRef[Counter]) -> Counter:
    return await rref.remote().next().remote().next()


async def type_of(rref: arpc.RRef[Counter]) -> str:
    return (await rref._get_type()).__name__


async def sum_of_stream(rref: arpc.RRef[Counter]) -> int:
    return sum([number async for number in rref.stream().numbers(3)])


async def make_elsewhere(owner: str, timeout: float) -> arpc.RRef[Counter]:
    return arpc.remote(owner, Counter, timeout=timeout)


kept: list[arpc.RRef[int]] = []


def keep(rref: arpc.RRef[int]) -> str:
    kept.append(rref)
    return arpc.get_worker_info().name


async def use_kept() -> int:
    return await kept[-1]


def drop_kept() -> None:
    kept.clear()


runs: list[str] = []


async def note_run(name: str) -> None:
    runs.append(name)


gate = threading.Event()
"""What runs in a thread can be made to wait for this."""


def make_at_the_gate(total: int) -> Counter:
    assert gate.wait(30)
    return Counter(total)


def make_bytes(size: int) -> bytes:
    return bytes(size)


pickled: list[str] = []


class Telling:
    """Tells when it is pickled."""

    def __reduce__(self) -> Any:
        pickled.append("Telling")
        return Telling, ()


def make_telling_at_the_gate() -> Telling:
    assert gate.wait(30)
    return Telling()


async def total_here(rref: arpc.RRef[Counter]) -> int:
    return (await rref.to_here()).total


async def local_total(rref: arpc.RRef[Counter]) -> int:
    return (await rref.local_value()).total


class Shape:
    """Travels as a plain tuple of its sizes."""

    def __init__(self, *sizes: int) -> None:
        self._sizes = sizes

    def __reduce__(self) -> Any:
        return tuple, ([*self._sizes],)


async def shape(*sizes: int) -> Shape:
    return Shape(*sizes)


class Unsendable:
    def answer(self) -> int:
        return 42

    def __reduce__(self) -> Any:
        pickled.append("Unsendable")
        raise TypeError("Unsendable stays here")
