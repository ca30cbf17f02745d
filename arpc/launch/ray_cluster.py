"""A group of workers on a Ray cluster: Ray finds room for them, starts and restarts them."""

from __future__ import annotations

import asyncio
import os
import pickle
import secrets
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, assert_never, overload

import cloudpickle

from arpc.errors import ConfigurationError, LaunchError, SerializationError
from arpc.extras import install_command
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
from arpc.launch.output import lost_another
from arpc.launch.plan import Group, MeetingPoint, Slot, as_group, check_environment, environment_of, on_nodes
from arpc.launch.programs import Module, Program, words
from arpc.launch.ray_worker import End, RayWorker, Ready
from arpc.launch.result import Launched

__all__ = ["ray"]

R = TypeVar("R")

POLL_S: Final = 0.1
KILLED: Final = -int(signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class _Exited:
    rank: int
    end: End


@dataclass(frozen=True, slots=True)
class _TimeIsUp:
    number: int


_Event: TypeAlias = _Exited | _TimeIsUp


def _engine() -> Any:
    try:
        import ray as engine
    except ImportError:
        raise ConfigurationError(f"workers on Ray need Ray: {install_command('ray')}") from None
    return engine


def check_room(engine: Any, workers: int, resources: Mapping[str, float]) -> None:
    """Raise `LaunchError` at once if the workers need more than the whole cluster has, even when it is idle."""
    there = engine.cluster_resources()
    missing = [
        f"{workers * amount:g} {name} ({workers} x {amount:g}), and the cluster has {there.get(name, 0):g}"
        for name, amount in resources.items()
        if workers * amount > there.get(name, 0)
    ]
    if missing:
        raise LaunchError(f"{workers} workers do not fit into this Ray cluster: they take {'; '.join(missing)}")


class RayGroup:
    """Carries out the decisions of `GroupLife` with actors: one launch, from its start to its end."""

    def __init__(
        self, slots: Sequence[Slot], program: Program, args: Sequence[Any], max_restarts: int, start_timeout_s: float
    ) -> None:
        self.life = GroupLife(len(slots), max_restarts=max_restarts, grace_s=0.0)
        self.ends: dict[int, End] = {}
        self._slots = slots
        self._max_restarts = max_restarts
        self._start_timeout_s = start_timeout_s
        self._method, self._work = _work_of(program, args)
        self._secret = secrets.token_hex(32)
        self._environment: dict[str, str] = {}
        self._http: str | None = None
        self._actors: list[Any] = []
        self._lives: dict[int, str] = {}
        self._events: asyncio.Queue[_Event] = asyncio.Queue()
        self._watchers: dict[int, asyncio.Task[None]] = {}
        self._alarm: asyncio.TimerHandle | None = None

    async def run(
        self, resources: Mapping[str, float], strategy: str, environment: Mapping[str, str], http: str | None
    ) -> Outcome:
        """Run the group to its end. Its actors are killed and their resources freed, even after an error."""
        engine = _engine()
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._environment = dict(environment)
        self._http = http
        check_room(engine, len(self._slots), resources)
        place = placement_group([dict(resources) for _ in self._slots], strategy=strategy)
        try:
            await self._wait_for_room(place, resources)
            others = {name: amount for name, amount in resources.items() if name not in {"CPU", "GPU"}}
            for slot in self._slots:
                options = {
                    "num_cpus": resources.get("CPU", 0),
                    "num_gpus": resources.get("GPU", 0),
                    "resources": others,
                    "max_restarts": -1,  # the restarts are counted for the group as a whole
                    "scheduling_strategy": PlacementGroupSchedulingStrategy(
                        place, placement_group_bundle_index=slot.rank
                    ),
                }
                self._actors.append(engine.remote(RayWorker).options(**options).remote(slot))
            outcome = await self._carry_out(self.life.start())
            while outcome is None:
                outcome = await self._carry_out(self._decide(await self._events.get()))
            return outcome
        finally:
            if self._alarm is not None:
                self._alarm.cancel()
            for actor in self._actors:
                engine.kill(actor)
            remove_placement_group(place)
            for watcher in self._watchers.values():
                watcher.cancel()
            if self._watchers:
                await asyncio.wait(self._watchers.values())

    async def _wait_for_room(self, place: Any, resources: Mapping[str, float]) -> None:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await place.ready()
        except TimeoutError:
            raise LaunchError(
                f"Ray found no room for {len(self._slots)} workers with {dict(resources)} each "
                f"within {self._start_timeout_s:g} s"
            ) from None

    def _decide(self, event: _Event) -> list[Decision]:
        match event:
            case _Exited(rank, end):
                self.ends[rank] = end
                return self.life.exited(rank, end.exit_code, lost_another=lost_another(end.traceback))
            case _TimeIsUp(number):
                return self.life.time_is_up(number)
            case _:
                assert_never(event)

    async def _carry_out(self, decisions: Sequence[Decision]) -> Outcome | None:
        engine = _engine()
        for decision in decisions:
            match decision:
                case Start(incarnation):
                    for rank, actor in enumerate(self._actors):
                        # kill it so that Ray restarts it; an actor that died is being restarted, and must not die twice
                        if rank in self.ends and not self.ends[rank].is_lost:
                            engine.kill(actor, no_restart=False)
                    self.ends.clear()
                    await self._start(incarnation)
                case Terminate(ranks) | Kill(ranks):
                    for rank in ranks:
                        engine.kill(self._actors[rank], no_restart=False)
                case SetAlarm(number, after_s):
                    if self._alarm is not None:
                        self._alarm.cancel()
                    loop = asyncio.get_running_loop()
                    self._alarm = loop.call_later(after_s, self._events.put_nowait, _TimeIsUp(number))
                case Restart(failure):
                    raise AssertionError(f"this group is not elastic, and restarts as a whole: {failure}")
                case Ended(outcome):
                    return outcome
                case _:
                    assert_never(decision)
        return None

    async def _start(self, incarnation: int) -> None:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                found = await asyncio.gather(*(self._new_life(slot.rank) for slot in self._slots))
                host, port = await self._open_meeting()
        except TimeoutError:
            raise LaunchError(
                f"Ray did not start all {len(self._slots)} workers in {self._start_timeout_s:g} s"
            ) from None
        meeting = MeetingPoint(host, port, incarnation, self._max_restarts)
        places = on_nodes([ready.node for ready in found])
        for slot, place in zip(self._slots, places, strict=True):
            environment = {
                **environment_of(slot, meeting, {"OMP_NUM_THREADS": "as Ray has set it"}),
                **place,
                "ARPC_SECRET": self._secret,
                **self._environment,
            }
            if self._http is not None and slot.rank == 0:
                environment["ARPC_HTTP"] = self._http
            self._watchers[slot.rank] = asyncio.create_task(self._watch(slot.rank, environment))

    async def _new_life(self, rank: int) -> Ready:
        """Wait until the actor runs in a process that has not run this worker before."""
        from ray.exceptions import RayActorError

        while True:
            try:
                ready: Ready = await self._actors[rank].ready.remote()
            except RayActorError:
                pass  # it is being started again
            else:
                if ready.life != self._lives.get(rank):
                    self._lives[rank] = ready.life
                    return ready
            await asyncio.sleep(POLL_S)  # killing takes Ray a moment

    async def _open_meeting(self) -> tuple[str, int]:
        from ray.exceptions import RayActorError

        while True:
            try:
                host, port = await self._actors[0].open_meeting.remote()
                return host, port
            except RayActorError:  # it died since it was ready, and is being started again
                await self._new_life(0)

    async def _watch(self, rank: int, environment: Mapping[str, str]) -> None:
        """Run the worker on its actor, and queue an event when it ends."""
        from ray.exceptions import ActorDiedError, RayActorError

        method = getattr(self._actors[rank], self._method)
        try:
            end: End = await method.remote(environment, self._work)
        except ActorDiedError as error:
            end = End(KILLED, f"Ray lost the actor: {error}".strip(), is_lost=True)
        except RayActorError as error:
            # The actor cannot be reached, and may be alive: the end of its work will not be reported, and Ray does not
            # start it again unless it is killed
            end = End(KILLED, f"Ray cannot reach the actor: {error}".strip())
        except Exception as error:  # noqa: BLE001 - Ray raises many, and without an event the launch would never end
            end = End(1, f"Ray could not run the worker: {error}".strip())
        self._events.put_nowait(_Exited(rank, end))

    def failure_of(self, outcome: Outcome) -> LaunchError:
        """Return the error to raise for an outcome that is no success."""
        assert outcome.failure is not None
        slot = self._slots[outcome.failure.rank]
        text = f"worker {slot.name!r} (rank {slot.rank}) {describe_exit(outcome.failure.exit_code)}"
        if self.life.incarnation:
            text += f", after the group was started again {self.life.incarnation} times"
        return LaunchError(text, slot.name, outcome.failure.exit_code, self.ends[slot.rank].traceback)

    def value_of(self, rank: int) -> Any:
        result = self.ends[rank].result
        return None if result is None else pickle.loads(result)


def _work_of(program: Program, args: Sequence[Any]) -> tuple[str, Any]:
    """Return the name of the actor's method that runs a program, and its argument."""
    if isinstance(program, Module):
        return "run_command", ["-m", program.name, *words(args)]
    if isinstance(program, str | os.PathLike):
        return "run_command", [str(Path(program).absolute()), *words(args)]
    try:
        return "run_function", cloudpickle.dumps((program, tuple(args)))
    except Exception as error:
        raise SerializationError(f"{program!r} cannot be sent to the workers: {error}") from error


@overload
async def ray(
    program: Callable[..., Coroutine[Any, Any, R]],
    args: Sequence[Any] = ...,
    *,
    workers: Group,
    max_restarts: int = ...,
    resources: Mapping[str, float] | None = ...,
    strategy: str = ...,
    environment: Mapping[str, str] | None = ...,
    http: str | None = ...,
    start_timeout_s: float = ...,
) -> Launched[R]: ...
@overload
async def ray(
    program: Callable[..., R],
    args: Sequence[Any] = ...,
    *,
    workers: Group,
    max_restarts: int = ...,
    resources: Mapping[str, float] | None = ...,
    strategy: str = ...,
    environment: Mapping[str, str] | None = ...,
    http: str | None = ...,
    start_timeout_s: float = ...,
) -> Launched[R]: ...
@overload
async def ray(
    program: str | os.PathLike[str] | Module,
    args: Sequence[str] = ...,
    *,
    workers: Group,
    max_restarts: int = ...,
    resources: Mapping[str, float] | None = ...,
    strategy: str = ...,
    environment: Mapping[str, str] | None = ...,
    http: str | None = ...,
    start_timeout_s: float = ...,
) -> Launched[None]: ...
async def ray(
    program: Program,
    args: Sequence[Any] = (),
    *,
    workers: Group,
    max_restarts: int = 0,
    resources: Mapping[str, float] | None = None,
    strategy: str = "PACK",
    environment: Mapping[str, str] | None = None,
    http: str | None = None,
    start_timeout_s: float = 300.0,
) -> Launched[Any]:
    """Run a function, a script or a module as workers of one group on a Ray cluster.

    Each worker is an actor in a placement group: ``resources`` are those of one worker (one CPU by default), and
    ``strategy`` is Ray's: ``"PACK"``, ``"SPREAD"``, ``"STRICT_PACK"`` or ``"STRICT_SPREAD"``. A function runs in the
    actor itself; a script, which every node must have under the same path, in a child process of the actor. Addresses
    and the secret of the group go through Ray. ``http`` is where rank 0, on its node, serves a dashboard.

    When a worker fails, or its node is lost, the group ends; Ray starts all actors again, where there is room, up to
    ``max_restarts`` times. Then `LaunchError` is raised. This calls `ray.init` if the program has not. When it returns
    or raises, its actors and its placement group are gone.
    """
    slots = as_group(workers)
    if max_restarts < 0:
        raise ConfigurationError(f"max_restarts must be 0 or more, not {max_restarts}")
    check_environment(environment or {})
    engine = _engine()
    if not engine.is_initialized():
        await asyncio.to_thread(engine.init)
    started = time.monotonic()
    group = RayGroup(slots, program, args, max_restarts, start_timeout_s)
    outcome = await group.run(resources or {"CPU": 1}, strategy, environment or {}, http)
    if not outcome.is_success:
        raise group.failure_of(outcome)
    values = {slot.name: group.value_of(slot.rank) for slot in slots}
    return Launched(values, group.life.incarnation, time.monotonic() - started)
