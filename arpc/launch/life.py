"""The life cycle of a group of processes, as a state machine without I/O: events in, decisions out.

::

    RUNNING --- a worker fails --------------------------> ENDING --- all have exited ---> RUNNING again, or ENDED
       |  `---- one fails because it lost another --> WAITING  ^
       |                                                 `-----'  the other fails too, or time is up
       `------- all exited with 0 ---> ENDED

When one worker dies, others that had calls in flight to it fail because of that, and may exit earlier. `WAITING` gives
the worker that failed first a moment to be reported: its traceback is the one that helps.

In an elastic group a worker that fails is started again by itself, and the others go on: the group stays `RUNNING`
until no restart is left.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "Decision",
    "Ended",
    "Failure",
    "GroupLife",
    "Kill",
    "Outcome",
    "Restart",
    "SetAlarm",
    "Start",
    "Terminate",
]


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a worker that ended the group."""

    rank: int
    exit_code: int
    """The exit code as in `subprocess`: negative for a signal."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a group: a success, the failure of a worker, or an interruption."""

    failure: Failure | None = None
    interrupted_by: signal.Signals | None = None

    @property
    def is_success(self) -> bool:
        return self.failure is None and self.interrupted_by is None


# -- decisions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Start all workers, with a new meeting place."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Restart:
    """Start this worker of an elastic group again; it joins the others at their meeting place."""

    failure: Failure
    incarnation: int


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask these workers to end (SIGTERM)."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill these workers (SIGKILL)."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SetAlarm:
    """Call `GroupLife.time_is_up` with this number in so many seconds. This replaces any earlier alarm."""

    number: int
    after_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """No worker is left and none will be started."""

    outcome: Outcome


Decision: TypeAlias = Start | Restart | Terminate | Kill | SetAlarm | Ended


class _Phase(enum.Enum):
    NEW = enum.auto()
    RUNNING = enum.auto()
    WAITING = enum.auto()
    ENDING = enum.auto()
    ENDED = enum.auto()


class GroupLife:
    """Decides what happens to a group. The caller carries out the returned decisions, in that order."""

    def __init__(
        self,
        size: int,
        *,
        max_restarts: int = 0,
        grace_s: float = 10.0,
        blame_s: float = 2.0,
        is_elastic: bool = False,
    ) -> None:
        self.incarnation = 0
        """The number of restarts of the group, or of workers of an elastic group."""
        self.alive: set[int] = set()
        self.failure: Failure | None = None
        """The failure that ends, or has ended, this incarnation; None if there is none yet."""
        self.restarted_for: Failure | None = None
        """The failure that caused the last restart of the group."""
        self._size = size
        self._max_restarts = max_restarts
        self._grace_s = grace_s
        self._blame_s = blame_s
        self._is_elastic = is_elastic
        self._phase = _Phase.NEW
        self._alarm = 0
        self._interrupted_by: signal.Signals | None = None

    @property
    def is_ending(self) -> bool:
        return self._phase in {_Phase.ENDING, _Phase.ENDED}

    def start(self) -> list[Decision]:
        assert self._phase is _Phase.NEW
        return self._begin()

    def exited(self, rank: int, exit_code: int, *, lost_another: bool = False) -> list[Decision]:
        """Handle the end of a worker; ``lost_another`` if it seems to have failed because another worker did."""
        if rank not in self.alive:
            return []
        may_restart = self._is_elastic and self._phase is _Phase.RUNNING and self.incarnation < self._max_restarts
        if exit_code != 0 and may_restart:
            self.incarnation += 1
            return [Restart(Failure(rank, exit_code), self.incarnation)]
        self.alive.discard(rank)
        decisions: list[Decision] = []
        if exit_code != 0:
            failure = Failure(rank, exit_code)
            if self._phase is _Phase.RUNNING and lost_another and self.alive:
                self.failure = failure
                self._phase = _Phase.WAITING
                decisions.append(self._set_alarm(self._blame_s))
            elif self._phase is _Phase.RUNNING or (self._phase is _Phase.WAITING and not lost_another):
                self.failure = failure
                decisions += self._end_the_rest()
        if not self.alive:
            decisions += self._all_have_exited()
        return decisions

    def interrupted(self, by: signal.Signals) -> list[Decision]:
        """Handle a signal to end the group. The second signal kills the workers at once."""
        if self._phase is _Phase.ENDED:
            return []
        again = self._interrupted_by is not None
        self._interrupted_by = self._interrupted_by or by
        if not self.alive:
            return self._all_have_exited()
        if again:
            return [Kill(self._ranks())]
        return self._end_the_rest()

    def time_is_up(self, number: int) -> list[Decision]:
        """Handle the alarm with that number."""
        if number != self._alarm or not self.alive:
            return []
        if self._phase is _Phase.WAITING:
            return self._end_the_rest()
        if self._phase is _Phase.ENDING:
            return [Kill(self._ranks())]
        return []

    def _begin(self) -> list[Decision]:
        self._phase = _Phase.RUNNING
        self.restarted_for, self.failure = self.failure, None
        self.alive = set(range(self._size))
        return [Start(self.incarnation)]

    def _end_the_rest(self) -> list[Decision]:
        self._phase = _Phase.ENDING
        if not self.alive:
            return []
        return [Terminate(self._ranks()), self._set_alarm(self._grace_s)]

    def _all_have_exited(self) -> list[Decision]:
        if self.failure is not None and self._interrupted_by is None and self.incarnation < self._max_restarts:
            self.incarnation += 1
            return self._begin()
        self._phase = _Phase.ENDED
        failure = None if self._interrupted_by is not None else self.failure
        return [Ended(Outcome(failure, self._interrupted_by))]

    def _set_alarm(self, after_s: float) -> SetAlarm:
        self._alarm += 1
        return SetAlarm(self._alarm, after_s)

    def _ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.alive))


def describe_exit(exit_code: int) -> str:
    """Describe how a process ended.

    >>> describe_exit(3), describe_exit(-9)
    ('ended with exit code 3', 'was killed by SIGKILL')
    """
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    known: Iterable[int] = [number.value for number in signal.Signals]
    return f"was killed by {signal.Signals(-exit_code).name if -exit_code in known else f'signal {-exit_code}'}"


def exit_status(exit_code: int) -> int:
    """Return the exit status that a shell reports for this exit code of a process.

    >>> exit_status(3), exit_status(-15)
    (3, 143)
    """
    return exit_code if exit_code >= 0 else 128 - exit_code
