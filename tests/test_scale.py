"""A call costs the same in a large group as in a small one: counted in steps of the interpreter, not in time."""

from __future__ import annotations

import inspect
import itertools
import sys
from types import FrameType
from typing import Any

import arpc
from arpc.testing import cluster

# Nothing that comes with time: a slow machine would count it
OPTIONS = arpc.RpcOptions(gc_freeze=False, heartbeat_interval=600, heartbeat_timeout=3600, busy_poll=0)
_CALLS = 30
_TIMES = 5


async def nothing() -> None:
    pass


class Steps:
    """Counts what the interpreter does in a thread while it is on."""

    def __init__(self) -> None:
        self.count = 0

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.count += event == "opcode"
        return self.trace


async def steps_per_round_of_calls(workers: int) -> int:
    """The least of some rounds: in others a timer may be due."""
    async with cluster(workers, options=OPTIONS) as group:
        here = group[0]
        names = itertools.cycle([worker.info.name for worker in group[1:]])
        for _ in range(3 * workers):  # connected, and the function known to everybody
            await here.rpc_sync(next(names), nothing)
        counted = []
        for _ in range(_TIMES):
            steps = Steps()
            if (frame := inspect.currentframe()) is not None:
                frame.f_trace_opcodes = True  # Python 3.12 traces bytecodes only if a frame has asked before it begins
            sys.settrace(steps.trace)
            try:
                for _ in range(_CALLS):
                    await here.rpc_sync(next(names), nothing)
            finally:
                sys.settrace(None)
            counted.append(steps.count)
        return min(counted)


async def test_a_call_takes_as_many_steps_among_24_workers_as_between_two():
    few, many = await steps_per_round_of_calls(2), await steps_per_round_of_calls(24)
    assert few > _CALLS * 100, "a call is more than that: was anything counted?"
    assert abs(many - few) <= 0.02 * few
