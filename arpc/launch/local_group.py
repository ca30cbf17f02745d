"""A group of processes on this machine: `local` from Python, `LocalGroup` for the command."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO, TypeAlias, TypeVar, assert_never, overload

from arpc.errors import ConfigurationError, LaunchError
from arpc.launch.breakpoints import HOOK
from arpc.launch.life import (
    Decision,
    Ended,
    GroupLife,
    Kill,
    Outcome,
    Restart,
    SetAlarm,
    Start,
    Terminate,
    describe_exit,
)
from arpc.launch.meeting import StoreServer, answers, write_secret
from arpc.launch.output import LineSplitter, Screen, Stream, Tail, lost_another, reading
from arpc.launch.plan import Group, MeetingPoint, Slot, as_group, check_environment, environment_of
from arpc.launch.programs import Module, Program, command_for, extend_path, result_of
from arpc.launch.result import Launched
from arpc.launch.status import Status
from arpc.launch.supervisor_process import Exited, News, NotForked, Started, SupervisorLost, SupervisorProcess

__all__ = ["LocalGroup", "Settings", "local"]

R = TypeVar("R")

DRAIN_S: Final = 1.0
"""Seconds to wait for the last output of a worker that has ended. Processes that it started may keep it open."""
LAST_DRAIN_S: Final = 30.0
"""Seconds to wait for output once all processes have ended: only one stuck in the kernel can keep it open then."""
STATUS_S: Final = 1.0
ANNOUNCE_S: Final = 0.1
READ_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a group."""

    max_restarts: int = 0
    grace_s: float = 10.0
    environment: Mapping[str, str] = field(default_factory=dict)
    http: str | None = None
    fork: bool = True
    elastic: bool = False

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ConfigurationError(f"max_restarts must be 0 or more, not {self.max_restarts}")
        if not self.grace_s >= 0:
            raise ConfigurationError(f"grace_s must be 0 or more, not {self.grace_s}")
        check_environment(self.environment)


@dataclass(frozen=True, slots=True)
class _TimeIsUp:
    number: int


@dataclass(frozen=True, slots=True)
class _Interrupted:
    by: signal.Signals


@dataclass(frozen=True, slots=True)
class _NotServed:
    """The store could not be served, so the workers will never meet."""

    reason: Exception


_Event: TypeAlias = News | _TimeIsUp | _Interrupted | _NotServed


class LocalGroup:
    """Carries out the decisions of `GroupLife`: one launch, from its start to its end."""

    def __init__(
        self,
        slots: Sequence[Slot],
        command: Callable[[int], Sequence[str]],
        settings: Settings,
        directory: Path,
        screen: Screen,
    ) -> None:
        self.life = GroupLife(
            len(slots),
            max_restarts=settings.max_restarts,
            grace_s=settings.grace_s,
            is_elastic=settings.elastic,
        )
        self.tails: dict[int, Tail] = {}
        self._slots = slots
        self._command = command
        self._settings = settings
        self._directory = directory
        self._screen = screen
        self._events: asyncio.Queue[_Event] = asyncio.Queue()
        self._pumps: dict[int, list[asyncio.Task[None]]] = {}
        self._server: StoreServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._is_unread = False
        self._started_at = time.monotonic()
        has_secret = os.environ.get("ARPC_SECRET") or os.environ.get("ARPC_SECRET_FILE")
        self._secret_file = None if has_secret else write_secret(directory)

    def interrupt(self, by: signal.Signals) -> None:
        """End the group; at once if this is the second call."""
        self._events.put_nowait(_Interrupted(by))

    async def run(self) -> Outcome:
        """Run the group to its end. No process is left, even after an error; a cancellation interrupts the group."""
        running = asyncio.create_task(self._run())
        cancelled: asyncio.CancelledError | None = None
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError as error:
                cancelled = error
                self.interrupt(signal.SIGTERM)
        if cancelled is not None:
            running.exception()
            raise cancelled
        return running.result()

    async def _run(self) -> Outcome:
        supervisor = await SupervisorProcess.open(self._events.put_nowait, self._directory)
        helpers = [asyncio.create_task(self._tick()), asyncio.create_task(self._announce())]
        try:
            outcome = await self._carry_out(supervisor, self.life.start())
            while outcome is None:
                outcome = await self._carry_out(supervisor, await self._decide(await self._events.get()))
            return outcome
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.wait(helpers)
            if self._alarm is not None:
                self._alarm.cancel()
            await supervisor.aclose()
            await self._close_incarnation()
            self._screen.close()

    async def _decide(self, event: _Event) -> list[Decision]:
        match event:
            case Started():
                return []
            case NotForked(problem):
                self._screen.say(f"{problem}: an interpreter is started for each worker")
                return []
            case Exited(rank, exit_code, problem):
                if problem:
                    self._screen.say(f"worker {self._slots[rank].name!r}: {problem}", is_bad=True)
                traceback = ""
                if exit_code and not self.life.is_ending:
                    await asyncio.wait(self._pumps[rank], timeout=DRAIN_S)
                    traceback = self.tails[rank].traceback
                return self.life.exited(rank, exit_code, lost_another=lost_another(traceback))
            case _TimeIsUp(number):
                return self.life.time_is_up(number)
            case _Interrupted(by):
                return self.life.interrupted(by)
            case _NotServed(reason):
                raise LaunchError(f"the group has no store to meet in: {reason}") from reason
            case SupervisorLost():
                raise LaunchError("the process that keeps the workers was killed, and all workers with it")
            case _:
                assert_never(event)

    async def _carry_out(self, supervisor: SupervisorProcess, decisions: Sequence[Decision]) -> Outcome | None:
        for decision in decisions:
            match decision:
                case Start(incarnation):
                    if incarnation:
                        self._say_restart(incarnation)
                        await supervisor.end_all()
                        await self._close_incarnation()
                    await self._start(supervisor, incarnation)
                case Restart(failure, incarnation):
                    slot = self._slots[failure.rank]
                    self._screen.say(
                        f"worker {slot.name!r} {describe_exit(failure.exit_code)}: starting it again "
                        f"({incarnation} of {self._settings.max_restarts})"
                    )
                    await self._start_worker(supervisor, slot, incarnation)
                case Terminate(ranks):
                    await supervisor.signal(ranks, signal.SIGTERM)
                case Kill(ranks):
                    await supervisor.signal(ranks, signal.SIGKILL)
                case SetAlarm(number, after_s):
                    if self._alarm is not None:
                        self._alarm.cancel()
                    loop = asyncio.get_running_loop()
                    self._alarm = loop.call_later(after_s, self._events.put_nowait, _TimeIsUp(number))
                case Ended(outcome):
                    await supervisor.end_all()
                    return outcome
                case _:
                    assert_never(decision)
        return None

    async def _start(self, supervisor: SupervisorProcess, incarnation: int) -> None:
        server = self._server = StoreServer()
        if self._settings.fork and len(self._slots) > 1 and not incarnation:
            await supervisor.warm(self._command(0), self._environment(self._slots[0], incarnation))
        for slot in self._slots:
            await self._start_worker(supervisor, slot, incarnation)
        self._serving = asyncio.create_task(self._serve(server))

    async def _start_worker(self, supervisor: SupervisorProcess, slot: Slot, incarnation: int) -> None:
        self.tails[slot.rank] = Tail()
        with contextlib.ExitStack() as stack:
            ends: list[int] = []
            for stream in ("stdout", "stderr"):
                reader, writer = os.pipe()
                stack.callback(os.close, writer)
                ends.append(writer)
                pump = asyncio.create_task(self._pump(reader, slot.rank, stream))
                self._pumps.setdefault(slot.rank, []).append(pump)
            await supervisor.start(
                slot.rank,
                self._command(slot.rank),
                environment=self._environment(slot, incarnation),
                directory=None,
                output=(ends[0], ends[1]),
            )

    def _environment(self, slot: Slot, incarnation: int) -> dict[str, str]:
        server = self._server
        assert server is not None  # `_start` opens the store before it starts workers
        meeting = MeetingPoint(server.host, server.port, incarnation, self._settings.max_restarts, self._secret_file)
        environment = {
            **extend_path(os.environ),
            **environment_of(slot, meeting, os.environ),
            "PYTHONBREAKPOINT": os.environ.get("PYTHONBREAKPOINT", HOOK),
            **self._settings.environment,
        }
        if self._settings.http is not None and slot.rank == 0:
            environment["ARPC_HTTP"] = self._settings.http
        if self._screen.columns is not None:
            environment["ARPC_LAUNCH_COLUMNS"] = str(self._screen.columns)
        return environment

    async def _serve(self, server: StoreServer) -> None:
        try:
            await server.serve()
        except Exception as error:  # noqa: BLE001 - torch raises many, and each of them ends the launch
            self._events.put_nowait(_NotServed(error))

    async def _pump(self, descriptor: int, rank: int, stream: Stream) -> None:
        """Show the output of a worker, until no process can write to it any more."""
        splitter = LineSplitter()
        tail = self.tails[rank]

        def show(line: str) -> None:
            if stream == "stderr":
                tail.add(line)
            self._screen.line(rank, stream, line)
            if self._screen.is_closed and not self._is_unread:
                self._is_unread = True  # a second interrupt would kill at once
                self.interrupt(signal.SIGPIPE)

        async with reading(descriptor) as reader:
            while data := await reader.read(READ_BYTES):
                for line in splitter.feed(data):
                    show(line)
                self._screen.show_progress(rank, splitter.progress)
        self._screen.show_progress(rank, "")
        for line in splitter.end():
            show(line)

    async def _close_incarnation(self) -> None:
        """After all workers have ended, wait for their last output, and close the store."""
        pumps = [pump for pumps in self._pumps.values() for pump in pumps]
        self._pumps.clear()
        if pumps:
            await asyncio.wait(pumps, timeout=LAST_DRAIN_S)
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)
        if self._serving is not None:
            await asyncio.wait([self._serving])
        if self._server is not None:
            await self._server.aclose()
        self._server = self._serving = None

    def _say_restart(self, incarnation: int) -> None:
        reason = ""
        failure = self.life.restarted_for
        if failure is not None:
            slot = self._slots[failure.rank]
            last = self.tails[slot.rank].traceback.rpartition("\n")[2]
            reason = f"worker {slot.name!r} {describe_exit(failure.exit_code)}{f' ({last})' if last else ''}: "
        self._screen.say(f"{reason}starting the group again ({incarnation} of {self._settings.max_restarts})")

    async def _tick(self) -> None:
        while True:
            self._screen.show_status(
                Status(
                    alive=len(self.life.alive),
                    workers=len(self._slots),
                    elapsed_s=time.monotonic() - self._started_at,
                    restarts=self.life.incarnation,
                    max_restarts=self._settings.max_restarts,
                    is_ending=self.life.is_ending,
                )
            )
            await asyncio.sleep(STATUS_S)

    async def _announce(self) -> None:
        """Print the address of the dashboard once it accepts connections."""
        http = self._settings.http
        if http is not None:
            while not await answers(http):  # noqa: ASYNC110 - another process starts to listen
                await asyncio.sleep(ANNOUNCE_S)
            self._screen.say(f"dashboard: http://{http}")

    def failure_of(self, outcome: Outcome) -> LaunchError:
        """Return the error to raise, or to print, for an outcome that is no success."""
        if outcome.failure is None:
            assert outcome.interrupted_by is not None
            return LaunchError(f"the group was ended by {outcome.interrupted_by.name}")
        slot = self._slots[outcome.failure.rank]
        traceback = self.tails[slot.rank].traceback
        text = f"worker {slot.name!r} (rank {slot.rank}) {describe_exit(outcome.failure.exit_code)}"
        if self.life.incarnation:
            what = "workers were" if self._settings.elastic else "the group was"
            text += f", after {what} started again {self.life.incarnation} times"
        return LaunchError(text, slot.name, outcome.failure.exit_code, traceback)


@overload
async def local(
    program: Callable[..., Coroutine[Any, Any, R]],
    args: Sequence[Any] = ...,
    *,
    workers: Group,
    max_restarts: int = ...,
    grace_s: float = ...,
    environment: Mapping[str, str] | None = ...,
    http: str | None = ...,
    fork: bool = ...,
    elastic: bool = ...,
    out: TextIO | None = ...,
    err: TextIO | None = ...,
) -> Launched[R]: ...
@overload
async def local(
    program: Callable[..., R],
    args: Sequence[Any] = ...,
    *,
    workers: Group,
    max_restarts: int = ...,
    grace_s: float = ...,
    environment: Mapping[str, str] | None = ...,
    http: str | None = ...,
    fork: bool = ...,
    elastic: bool = ...,
    out: TextIO | None = ...,
    err: TextIO | None = ...,
) -> Launched[R]: ...
@overload
async def local(
    program: str | os.PathLike[str] | Module,
    args: Sequence[str] = ...,
    *,
    workers: Group,
    max_restarts: int = ...,
    grace_s: float = ...,
    environment: Mapping[str, str] | None = ...,
    http: str | None = ...,
    fork: bool = ...,
    elastic: bool = ...,
    out: TextIO | None = ...,
    err: TextIO | None = ...,
) -> Launched[None]: ...
async def local(  # noqa: PLR0913 - a launch has many settings, all of them given by name
    program: Program,
    args: Sequence[Any] = (),
    *,
    workers: Group,
    max_restarts: int = 0,
    grace_s: float = 10.0,
    environment: Mapping[str, str] | None = None,
    http: str | None = None,
    fork: bool = True,
    elastic: bool = False,
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> Launched[Any]:
    """Run a script, a module or a function in processes of this machine, each a worker of one group.

    ::

        async def main(greeting: str) -> str:
            async with arpc.init_rpc() as worker:  # its name, rank, secret and meeting place are in the environment
                return f"{greeting} from {worker.name}"

        launched = await arpc.launch.local(main, args=("hello",), workers={"ps": 1, "trainer": 2})
        launched.values["trainer1"]  # 'hello from trainer1'

    ``workers`` is the number of workers, or a dict with the number for each role. ``environment`` is added to the
    environment of the workers. Their output goes to ``out`` and ``err``, or stdout and stderr, each line with the name
    of its worker. ``http`` is the address at which rank 0 serves a dashboard.

    On Linux two or more workers are forked from one process that has imported torch, which saves time and memory. Pass
    ``fork=False`` for scripts that set variables which torch reads while it is imported.

    The first worker that fails ends the group: the others get SIGTERM, and SIGKILL after ``grace_s`` seconds. Then the
    group is started again, up to ``max_restarts`` times, with a new meeting place. After the last restart `LaunchError`
    is raised, which has that worker's traceback. With ``elastic``, for programs that join by
    ``init_rpc(world_size=None)``, the worker that failed is started again by itself while the others go on. Cancelling
    ends the group in the same way. When this returns or raises, no worker is left, nor any process that the workers
    have started.
    """
    slots = as_group(workers)
    settings = Settings(max_restarts, grace_s, environment or {}, http, fork, elastic)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="arpc-launch-") as name:
        directory = Path(name)
        command = command_for(program, args, directory)
        group = LocalGroup(slots, command, settings, directory, Screen(slots, out, err))
        outcome = await group.run()
        if not outcome.is_success:
            raise group.failure_of(outcome)
        is_function = not isinstance(program, str | os.PathLike | Module)
        values = {slot.name: result_of(directory, slot.rank, slot.name) if is_function else None for slot in slots}
        return Launched(values, group.life.incarnation, time.monotonic() - started)
