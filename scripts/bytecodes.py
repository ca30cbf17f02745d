"""Bytecodes per call: the cost of a call in Python, counted instead of timed, and so the same on every machine.

Both sides run in one process, on one uvloop and over the in-memory transport. Every bytecode that any Python function
executes for a call counts, on whatever thread::

    python -m scripts.bytecodes                             # the table
    python -m scripts.bytecodes --against ../an/older/arpc  # beside that of another checkout
    python -m scripts.bytecodes --by-function "two ints"    # one shape, function by function
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import uvloop

import arpc
from arpc.bench.arpc_shapes import call_of
from arpc.bench.asyncio_caller import Call
from arpc.bench.functions import Flavour
from arpc.bench.shapes import BY_NAME
from arpc.bench.systems import CALLEE
from arpc.testing import cluster

__all__ = ["COUNTED", "FunctionCount", "count", "main", "print_totals", "run"]

COUNTED: Final[tuple[tuple[str, Flavour], ...]] = (
    ("call/no arguments", "async"),
    ("call/two ints", "async"),
    ("call/keyword arguments", "async"),
    ("call/dict of lists, text, floats", "async"),
    ("call/16-float tensor", "async"),
    ("call/tensor and int", "async"),
    ("containers/list of 10 tensors", "async"),
    ("containers/dict of 50 tensors of 4 KB", "async"),
    ("rref/method", "async"),
    ("rref/remote() and to_here()", "async"),
    ("autograd/context, nothing requires grad", "async"),
    ("autograd/1 in a row", "async"),
    ("autograd/2 in a row", "async"),
    ("call/no arguments", "def"),
)
"""The shapes of the table, in its order."""

WARM_UP_CALLS: Final = 100
CALLS: Final = 20
SAMPLES: Final = 5
"""The number of samples, of which the smallest counts: a timer may fire in some of them."""

_SETTLE_S: Final = 0.02
"""Seconds to wait after the calls: their delayed work, such as the release of a reference, counts too."""

_CHILD: Final = """
import sys
import arpc.bench
arpc.bench.__path__.append(sys.argv[1] + "/arpc/bench")  # an older checkout may lack the lists of shapes
sys.path.append(sys.argv[1])
from scripts.bytecodes import print_totals
print_totals(sys.argv[2])
"""


@dataclass(frozen=True, slots=True)
class FunctionCount:
    """The work of one function for one call, on average."""

    name: str
    place: str
    bytecodes: float
    entered: float
    """The number of times that it was called or resumed."""


class _BytecodeCounter:
    """A trace function for every thread, which counts while `counting` is set."""

    def __init__(self) -> None:
        self.counting = False
        self.bytecodes: Counter[CodeType] = Counter()
        self.entered: Counter[CodeType] = Counter()

    def enter(self, frame: FrameType, _event: str, _argument: Any) -> Callable[..., Any] | None:
        if not self.counting or frame.f_code.co_filename == __file__:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        self.entered[frame.f_code] += 1
        return self._step

    def _step(self, frame: FrameType, event: str, _argument: Any) -> Callable[..., Any]:
        if event == "opcode":
            self.bytecodes[frame.f_code] += 1
        return self._step

    @contextmanager
    def on_every_thread(self) -> Iterator[None]:
        """Trace this thread, and the threads that start inside of the block."""
        if (frame := inspect.currentframe()) is not None:
            frame.f_trace_opcodes = True  # Python 3.12 traces bytecodes only if a frame has asked before it begins
        threading.settrace(self.enter)
        sys.settrace(self.enter)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)

    async def sample(self, call: Call) -> int:
        """Count some calls from zero; return the total."""
        self.bytecodes.clear()
        self.entered.clear()
        self.counting = True
        try:
            for _ in range(CALLS):
                await call()
            await _settle()
        finally:
            self.counting = False
        return self.bytecodes.total()


async def count(name: str, flavour: Flavour) -> list[FunctionCount]:
    """Count one shape; return its functions, those with most bytecodes first."""
    counter = _BytecodeCounter()
    best: tuple[int, dict[CodeType, int], dict[CodeType, int]] | None = None
    with counter.on_every_thread():
        async with cluster(("caller", CALLEE)):
            call = call_of(BY_NAME[name], flavour)
            for _ in range(WARM_UP_CALLS):
                await call()
            await _settle()
            for _ in range(SAMPLES):
                total = await counter.sample(call)
                if best is None or total < best[0]:
                    best = total, dict(counter.bytecodes), dict(counter.entered)
            del call  # a reference that it holds is released before the cluster ends
    assert best is not None
    _, bytecodes, entered = best
    return [
        FunctionCount(code.co_qualname, _place(code), done / CALLS, entered[code] / CALLS)
        for code, done in sorted(bytecodes.items(), key=lambda item: -item[1])
    ]


def run(name: str, flavour: Flavour) -> list[FunctionCount]:
    """Count one shape on a loop of its own."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # uvloop.run adds a frame of its own
        return runner.run(count(name, flavour))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or the functions of one shape; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bytecodes", description="Count bytecodes per call.")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="beside those of another checkout of arpc")
    parser.add_argument("--by-function", metavar="SHAPE", help="those of one shape, function by function")
    options = parser.parse_args(arguments)
    if options.by_function is not None:
        return _print_functions(options.by_function)
    if options.against is not None and not (options.against / "arpc").is_dir():
        print(f"{options.against} is no checkout of arpc: it has no folder named arpc", file=sys.stderr)
        return 2
    totals = _totals(COUNTED)
    other = _totals_of(options.against) if options.against is not None else None
    _print_table(totals, other, options.against)
    return 0


def print_totals(shapes: str) -> None:
    """Print the totals of the tree that this process has imported, for the parent process that compares them.

    `shapes`: like `COUNTED`, in JSON.
    """
    print(json.dumps(_totals(json.loads(shapes))))


def _totals(shapes: Iterable[tuple[str, Flavour]]) -> dict[str, int]:
    totals = {}
    for name, flavour in shapes:
        functions = run(name, flavour)
        totals[f"{name}, {flavour}"] = round(sum(function.bytecodes for function in functions))
    return totals


def _totals_of(tree: Path) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(Path(__file__).parents[1]), json.dumps(COUNTED)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    totals: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return totals


def _print_table(totals: Mapping[str, int], other: Mapping[str, int] | None, tree: Path | None) -> None:
    width = max(map(len, totals))
    if other is None:
        print(f"{'bytecodes per call, both sides':{width}} {'this tree':>10}")
        for name, total in totals.items():
            print(f"{name:{width}} {total:10,}")
        return
    print(f"{'bytecodes per call, both sides':{width}} {'other':>10} {'this tree':>10} {'ratio':>6}   other: {tree}")
    for name, total in sorted(totals.items(), key=lambda item: -item[1] / other[item[0]]):
        print(f"{name:{width}} {other[name]:10,} {total:10,} {total / other[name]:6.2f}")


def _print_functions(pattern: str) -> int:
    matches = [
        (name, flavour)
        for name, flavour in (*COUNTED, *((name, "async") for name in BY_NAME))
        if pattern in f"{name}, {flavour}" or pattern == BY_NAME[name].function
    ]
    if not matches:
        print(f"no shape has {pattern!r}; there are: {', '.join(BY_NAME)}", file=sys.stderr)
        return 2
    name, flavour = matches[0]
    functions = run(name, flavour)
    print(f"{name}, {flavour}: {sum(function.bytecodes for function in functions):,.0f} bytecodes per call, both sides")
    print(f"{'bytecodes':>9} {'entered':>8}  function")
    for function in functions:
        print(f"{function.bytecodes:9,.1f} {function.entered:8,.2f}  {function.name}  {function.place}")
    return 0


async def _settle() -> None:
    """Sleep without a Python frame that would be counted."""
    loop = asyncio.get_running_loop()
    awake = loop.create_future()
    loop.call_later(_SETTLE_S, awake.set_result, None)
    await awake


def _place(code: CodeType) -> str:
    root = Path(arpc.__file__).parent.parent
    path = Path(code.co_filename)
    return f"{path.relative_to(root) if path.is_relative_to(root) else path}:{code.co_firstlineno}"


if __name__ == "__main__":
    sys.exit(main())
