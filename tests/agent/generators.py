"""Generators to stream from, shared by the tests of streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import arpc
from tests.agent.stage import Stage, the_stage


async def count_up(stop: int) -> AsyncIterator[int]:
    for number in range(stop):
        yield number


async def count_up_slowly(stop: int) -> AsyncIterator[int]:
    for number in range(stop):
        await asyncio.sleep(0)
        yield number


def count_up_in_thread(stop: int) -> Iterator[int]:
    yield from range(stop)


EVERY_GENERATOR = [count_up, count_up_slowly, count_up_in_thread]


async def watched() -> AsyncIterator[int]:
    """Never ends; tells how far it has come, and when it is stopped."""
    stage = the_stage()
    number = 0
    try:
        while True:
            stage.reached(f"made {number}")
            yield number
            number += 1
    finally:
        stage.reached("stopped")


def watched_in_thread() -> Iterator[int]:
    stage = the_stage()
    number = 0
    try:
        while True:
            stage.reached(f"made {number}")
            yield number
            number += 1
    finally:
        stage.reached("stopped")


WATCHED = [watched, watched_in_thread]


def made(stage: Stage) -> int:
    return sum(point.startswith("made") for point in stage.log)


async def held_after_one() -> AsyncIterator[int]:
    stage = the_stage()
    try:
        yield 1
        stage.reached("waiting")
        await stage.pass_gate()
        yield 2
    finally:
        stage.reached("stopped")


async def collect(stream: arpc.Stream[Any]) -> list[Any]:
    return [item async for item in stream]
