"""Counts calls and handlers, by function and peer. Installed only while metrics are read: see `metrics.service`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from arpc.agent.server.functions import name_of
from arpc.metrics.histogram import Histogram, SparseCounts, difference
from arpc.user_errors import class_name_of
from arpc.wire.messages import Inspect
from arpc.wire.values.pickler import importable_name

__all__ = ["OTHER_FUNCTIONS", "OTHER_PEERS", "Recorder", "Series"]

_MAX_SERIES: Final = 2_000
"""Functions created for each call, as lambdas may be, must not fill the memory: further names share a row."""
OTHER_FUNCTIONS: Final = "(others)"
OTHER_PEERS: Final = "(others)"
_ROTATE_S: Final = 10.0
_INSPECT: Final = Inspect.__name__


class Series:
    """The calls of one function between this worker and one peer, in one direction."""

    __slots__ = ("_before", "_before_at", "_middle", "_middle_at", "durations", "errors")

    def __init__(self, now: float) -> None:
        self.durations = Histogram()
        self.errors: dict[str, int] = {}
        """The number of failures, by the name of the exception's class."""
        self._before: SparseCounts = {}
        self._before_at = now
        self._middle: SparseCounts = {}
        self._middle_at = now

    def rotate(self, now: float) -> None:
        """Move the beginning of `recent` to the rotation before this one."""
        self._before, self._before_at = self._middle, self._middle_at
        self._middle, self._middle_at = self.durations.sparse(), now

    def recent(self) -> tuple[SparseCounts, float]:
        """Return the recent counts, and the time since which they count."""
        return difference(self.durations.sparse(), self._before), self._before_at


class Recorder:
    """The series of one worker: a `Meter` of its agent. Belongs to the loop."""

    def __init__(self, now: float, on_failure: Callable[[str, str, BaseException], None] | None = None) -> None:
        """``on_failure`` is called for each handler that failed, with its caller, its name and the error."""
        self.since = now
        self._on_failure = on_failure
        self.calls: dict[tuple[str, str], Series] = {}
        """The calls of this worker, by peer and function."""
        self.handlers: dict[tuple[str, str], Series] = {}
        """The calls of peers that this worker handles, by peer and function."""
        self._by_function: dict[tuple[str, Any], Series] = {}
        """The series of `calls`, by the function itself: finding its name takes longer than all the rest."""
        self._now = now
        self._rotated_at = now

    def call_ended(self, peer: str, function: Any, duration_ns: int, error: BaseException | None) -> None:
        try:
            series = self._by_function[peer, function]
        except BaseException:  # noqa: BLE001 - not known yet, or an object of a user that cannot be hashed
            if function is Inspect:
                return  # a question of monitoring, not a call of the program
            if function.__class__ is str:
                series = self.calls.get((peer, function)) or self._add(self.calls, peer, function)
            else:
                series = self._find(peer, function)
        series.durations.add(duration_ns)
        if error is not None:
            _count_error(series, error)

    def handler_ended(self, caller: str, function: str, duration_ns: int) -> None:
        if function == _INSPECT:
            return
        series = self.handlers.get((caller, function)) or self._add(self.handlers, caller, function)
        series.durations.add(duration_ns)

    def handler_failed(self, caller: str, function: str, error: BaseException) -> None:
        if function != _INSPECT:
            series = self.handlers.get((caller, function)) or self._add(self.handlers, caller, function)
            _count_error(series, error)
            if self._on_failure is not None:
                self._on_failure(caller, function, error)

    def _find(self, peer: str, function: Any) -> Series:
        name = name_of(function)
        series = self.calls.get((peer, name)) or self._add(self.calls, peer, name)
        with suppress(BaseException):  # a user's object may raise anything when it is inspected
            if len(self._by_function) < _MAX_SERIES and importable_name(function) is not None:
                # a function that is created for each call must not be kept alive
                self._by_function[peer, function] = series
        return series

    def _add(self, known: dict[tuple[str, str], Series], peer: str, function: str) -> Series:
        if len(known) >= _MAX_SERIES:
            function = OTHER_FUNCTIONS
        if len(known) >= 2 * _MAX_SERIES:  # workers of an elastic group may come and go forever
            peer = OTHER_PEERS
        key = (peer, function)
        if key not in known:
            known[key] = Series(self._now)
        return known[key]

    def tick(self, now: float) -> None:
        """Move the period of recent counts on. Called about once a second."""
        self._now = now
        if now - self._rotated_at >= _ROTATE_S:
            self._rotated_at = now
            for series in (*self.calls.values(), *self.handlers.values()):
                series.rotate(now)

    def totals(self) -> dict[str, float]:
        """Return how many calls, handled requests and errors there have been so far."""
        calls, handlers = self.calls.values(), self.handlers.values()
        return {
            "calls": float(sum(series.durations.count for series in calls)),
            "handled": float(sum(series.durations.count for series in handlers)),
            "errors": float(sum(sum(series.errors.values()) for series in calls)),
        }


def _count_error(series: Series, error: BaseException) -> None:
    name = class_name_of(error)
    series.errors[name] = series.errors.get(name, 0) + 1
