"""The decision whether a run of torch's engine is short enough for the loop, or goes to a thread.

A thread costs 100 us and more; a run on the loop blocks everything else. Graphs are repeated step after step, so the
time that a graph of the same size took before is the best guess. A new one is judged by its nodes and gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from math import inf
from time import perf_counter, thread_time
from typing import Any, Final, TypeAlias, TypeVar

import torch

from arpc.autograd.passes.plan import Plan
from arpc.autograd.passes.protocol import Run

__all__ = ["Extent", "RunPolicy", "ThreadsOnly", "extent_of"]

T = TypeVar("T")

SHORT_S: Final = 0.001
"""The longest time for which a run may block the loop."""
# Graphs of about this size take that long on one core
SHORT_NODES: Final = 200
SHORT_ELEMENTS: Final = 100_000

SLICE_S: Final = 0.002
"""About how long a part of a long run takes, after which other workers get its gradients."""

_LEAST_S: Final = 1e-5

_REMEMBERED: Final = 1024
_UNTIMED: Final = 15
"""The number of further runs of a long graph that are not timed: a clock that was not read for some time is slow."""


Extent: TypeAlias = tuple[int, int]
"""The size of a run: its nodes, and the elements of the gradients that enter it and of its leaves."""


def extent_of(run: Run, plan: Plan) -> Extent:
    """Return the approximate size of a run."""
    count = elements = 0
    for _, gradient in run.entering:
        elements += gradient.numel()
    leaves = plan.leaves
    for region in run.regions:
        targets = region.targets
        count += region.size + len(targets)
        if leaves:
            for node, _ in targets:
                if node in leaves:
                    elements += leaves[node].numel()
    return count, elements


class RunPolicy:
    """The times that runs took on one worker. Graphs are distinguished by their numbers of nodes and of elements."""

    def __init__(self) -> None:
        self._seconds_per_node = SHORT_S / SHORT_NODES
        """In the last run that was not short, or as large as a slice."""
        self._seconds: dict[tuple[int, int], float] = {}
        self._short: set[tuple[int, int]] = set()
        """Graphs that are known to be short, except those that took long the last time."""
        self._untimed: dict[tuple[int, int], int] = {}
        """The number of further runs that are not timed, of graphs that take long."""

    @property
    def nodes_per_slice(self) -> float:
        """The number of nodes after which a run is cut, see `PassProtocol.next_run`."""
        # runs in anomaly mode stay on the loop, and cut ones do not
        return inf if torch.is_anomaly_enabled() else SLICE_S / self._seconds_per_node

    def is_short(self, extent: Extent, run: Run, plan: Plan) -> bool:
        """Whether a run happens on the loop."""
        if extent in self._short:
            return True
        count, elements = extent
        seconds = self._seconds.get(extent)
        if seconds is not None:
            is_short = seconds <= SHORT_S
        else:
            is_short = (
                count <= SHORT_NODES
                and elements <= SHORT_ELEMENTS
                and elements + _count_inner_elements(run, plan) <= SHORT_ELEMENTS
            )
        # Anomaly mode changes warning filters, which belong to the process: such runs stay on the loop
        return is_short or torch.is_anomaly_enabled()

    def run(self, extent: Extent, function: Callable[..., T], *args: Any) -> T:
        """Run a graph in the current thread, be it the loop's or another, and record the time that it took."""
        if extent in self._short:
            begun = perf_counter()
            # The CPU time of a thread is slow to read, and not needed as long as the graph stays short
            result = function(*args)
            seconds = perf_counter() - begun
            if seconds > SHORT_S:
                self._short.discard(extent)
            self._pace(extent, seconds)
            return result
        if (untimed := self._untimed.pop(extent, 0)) > 0:
            self._untimed[extent] = untimed - 1
            return function(*args)
        begun, cpu_begun = perf_counter(), thread_time()
        result = function(*args)
        self.took(extent, perf_counter() - begun, thread_time() - cpu_begun)
        return result

    def took(self, extent: Extent, seconds: float, cpu_seconds: float) -> None:
        """Record the time that a run took, and the CPU time in it."""
        known = self._seconds.get(extent)
        is_new = known is None
        if known is None:
            if len(self._seconds) >= _REMEMBERED:
                self._seconds.clear()
                self._short.clear()
                self._untimed.clear()
            known = cpu_seconds
        # A run that waits may wait for a hook that blocks, or for other programs on this machine. Only hooks repeat.
        self._seconds[extent] = max(cpu_seconds, min(seconds, 2 * known))
        self._pace(extent, self._seconds[extent])
        if self._seconds[extent] > SHORT_S:
            self._short.discard(extent)
            if not is_new and known > SHORT_S and cpu_seconds > SHORT_S:
                self._untimed[extent] = _UNTIMED
        elif seconds <= SHORT_S:
            self._short.add(extent)

    def _pace(self, extent: Extent, seconds: float) -> None:
        """Record how long nodes took: in long runs, and in all slices, or one slow run would cut all later ones."""
        count = max(extent[0], 1)
        if seconds > SHORT_S or count * self._seconds_per_node >= SLICE_S:
            self._seconds_per_node = max(seconds, _LEAST_S) / count


class ThreadsOnly(RunPolicy):
    """The policy of workers whose nodes and hooks may block, and wait for the loop: nothing runs on the loop."""

    def is_short(self, extent: Extent, run: Run, plan: Plan) -> bool:
        return False

    def run(self, extent: Extent, function: Callable[..., T], *args: Any) -> T:
        return function(*args)


def _count_inner_elements(run: Run, plan: Plan) -> int:
    """Return the number of elements of the gradients that enter the nodes of a run."""
    running = set(run.regions)
    return sum(
        math.prod(entry.shape)
        for node, owner in plan.owners.items()
        if owner in running
        for entry in getattr(node, "_input_metadata", ())
    )
