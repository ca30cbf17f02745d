"""Whether a run of the local engine is short enough to happen on the loop, or goes to a thread.

A thread costs 100 us and more; on the loop everything else stands still meanwhile. Graphs come again, step after step,
so what a graph of the same size took before is the best guess. Of a new one, what its gradients weigh must do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from time import perf_counter, thread_time
from typing import Any, Final, Protocol, TypeVar

import torch

__all__ = ["Pace", "ThreadsOnly"]

T = TypeVar("T")

SHORT_S: Final = 0.001
"""How long the loop may stand still."""
# About as long as that takes on one core
SHORT_NODES: Final = 200
SHORT_ELEMENTS: Final = 100_000

_REMEMBERED: Final = 1024
_PATIENCE: Final = 16
"""How often a graph is refused that took too long once, before it is tried on the loop again."""
_UNTIMED: Final = 15
"""Of a graph that takes long, as many further runs are not timed: clocks that were not read for long are slow."""
_FORGIVABLE_S: Final = 10 * SHORT_S


class Extent(Protocol):
    """A graph, as far as it is judged here: a plan, or what is known of one that needs none."""

    @property
    def count(self) -> int: ...
    @property
    def nodes(self) -> Iterable[Any]: ...


class Pace:
    """What runs took on one worker. A graph is told from others by how many nodes and elements it is about."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], float] = {}
        self.short: set[tuple[int, int]] = set()
        """Graphs that are known to be short, but for those that took long the last time."""
        self._refused: dict[tuple[int, int], int] = {}
        """How often those were refused that took long when they were tried."""
        self._untimed: dict[tuple[int, int], int] = {}
        """How many more runs of those that take long are not timed."""

    def run(self, run: Callable[[], None], plan: Extent, elements: int) -> None:
        """Run a graph, on the loop or in a thread, and note what it took."""
        self._run(run, (plan.count, elements))

    def _run(self, run: Callable[..., T], key: tuple[int, int], *args: Any) -> T:
        if key in self.short:
            begun = perf_counter()
            # Reading the time that a thread had of the CPU is slow, and tells nothing new as long as nothing changes
            result = run(*args)
            if perf_counter() - begun > SHORT_S:
                self.short.discard(key)
            return result
        if (untimed := self._untimed.pop(key, 0)) > 0:
            self._untimed[key] = untimed - 1
            return run(*args)
        begun, cpu_begun = perf_counter(), thread_time()
        result = run(*args)
        self._took(key, perf_counter() - begun, thread_time() - cpu_begun)
        return result

    def try_to_run(self, run: Callable[..., T], nodes: Iterable[Any], key: tuple[int, int], *args: Any) -> T | None:
        """Run a graph of these nodes on the loop, with these arguments, if it is short. What comes of it, or None.

        ``key``: how many nodes and elements it is about.
        """
        if not self._is_short(key, nodes):
            self._note_refusal(key)
            return None
        return self._run(run, key, *args)

    def _note_refusal(self, key: tuple[int, int]) -> None:
        # What runs instead is about more, and so is another graph. Were it not for this, one that met with bad luck
        # once, or had to load something the first time, would never be tried again.
        if self._seconds.get(key, math.inf) <= _FORGIVABLE_S:
            refused = self._refused.pop(key, 0) + 1
            if refused < _PATIENCE:
                self._refused[key] = refused
            else:
                del self._seconds[key]
                self._untimed.pop(key, None)

    def is_short(self, plan: Extent, elements: int) -> bool:
        """Whether a run is to happen on the loop."""
        return self._is_short((plan.count, elements), plan.nodes)

    def _is_short(self, key: tuple[int, int], nodes: Iterable[Any]) -> bool:
        count, elements = key
        seconds = self._seconds.get(key)
        if seconds is not None:
            is_short = seconds <= SHORT_S
        else:
            is_short = (
                count <= SHORT_NODES
                and elements <= SHORT_ELEMENTS
                and elements + sum(map(_elements, nodes)) <= SHORT_ELEMENTS
            )
        # anomaly mode changes warning filters, which are the process's: that stays on the loop
        return is_short or torch.is_anomaly_enabled()

    def took(self, plan: Extent, elements: int, seconds: float, cpu_seconds: float) -> None:
        """Note what a run took, and how much of that the CPU was busy with it."""
        self._took((plan.count, elements), seconds, cpu_seconds)

    def _took(self, key: tuple[int, int], seconds: float, cpu_seconds: float) -> None:
        known = self._seconds.get(key)
        is_new = known is None
        if known is None:
            if len(self._seconds) >= _REMEMBERED:
                self._seconds.clear()
                self.short.clear()
                self._refused.clear()
                self._untimed.clear()
            known = cpu_seconds
        # What it waited for may be a hook that blocks, or other programs on this machine. The first comes again.
        self._seconds[key] = max(cpu_seconds, min(seconds, 2 * known))
        if self._seconds[key] > SHORT_S:
            self.short.discard(key)
            if not is_new and known > SHORT_S and cpu_seconds > SHORT_S:
                self._untimed[key] = _UNTIMED
        elif seconds <= SHORT_S:
            self.short.add(key)


class ThreadsOnly(Pace):
    """For workers whose nodes and hooks may block, and wait for what the loop does: nothing runs there."""

    def try_to_run(self, run: Callable[..., T], nodes: Iterable[Any], key: tuple[int, int], *args: Any) -> None:
        return None

    def is_short(self, plan: Extent, elements: int) -> bool:
        return False

    def run(self, run: Callable[[], None], plan: Extent, elements: int) -> None:
        run()


def _elements(node: Any) -> int:
    """How large the gradients are that enter a node."""
    return sum(math.prod(entry.shape) for entry in getattr(node, "_input_metadata", ()))
