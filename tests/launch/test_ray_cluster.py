"""What becomes of a group on Ray when Ray itself fails: told without a cluster, by an actor that is none."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType

import pytest

import arpc
from arpc.launch.plan import as_group
from arpc.launch.ray_cluster import RayGroup, _Exited
from arpc.launch.ray_worker import End, Ready


class ActorError(Exception):
    pass


class ActorDiedError(ActorError):
    pass


class ActorUnavailableError(ActorError):
    pass


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    exceptions = ModuleType("ray.exceptions")
    exceptions.RayActorError = ActorError
    exceptions.ActorDiedError = ActorDiedError
    ray = ModuleType("ray")
    ray.kill = lambda actor, *, no_restart: actor.kill(no_restart=no_restart)
    for name, module in {"ray": ray, "ray.exceptions": exceptions}.items():
        monkeypatch.setitem(sys.modules, name, module)


class Actor:
    """Whatever is asked of it fails."""

    def __init__(self, error: Exception) -> None:
        self.run_command = self
        self._error = error

    async def remote(self, *_: object) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (ActorDiedError("node is gone"), End(-9, "Ray lost the actor: node is gone", is_lost=True)),
        (ActorUnavailableError("no answer"), End(-9, "Ray cannot reach the actor: no answer")),
        (ValueError("not found"), End(1, "Ray could not run the worker: not found")),
    ],
)
async def test_every_error_is_the_end_of_a_worker(engine: None, error: Exception, end: End):
    group = RayGroup(as_group(1), "script.py", (), 0, 1.0)
    group._actors.append(Actor(error))
    await group._watch(0, {})
    assert group._events.get_nowait() == _Exited(0, end)


class Restarted:
    """An actor that Ray starts again when it is killed, and only then."""

    def __init__(self, error: Exception) -> None:
        self.kills = 0
        self.run_command = Actor(error)
        self.ready = self

    def kill(self, *, no_restart: bool) -> None:
        assert not no_restart
        self.kills += 1

    async def remote(self) -> Ready:
        return Ready(f"life {self.kills}", "node", "address")


async def test_one_that_cannot_be_reached_is_killed_to_be_started_again(engine: None, monkeypatch: pytest.MonkeyPatch):
    group = RayGroup(as_group(1), "script.py", (), 1, 30.0)
    actor = Restarted(ActorUnavailableError("no answer"))
    group._actors.append(actor)

    async def open_meeting() -> tuple[str, int]:
        return "host", 1

    monkeypatch.setattr(group, "_open_meeting", open_meeting)
    assert await group._carry_out(group.life.start()) is None
    assert await group._carry_out(group._decide(await group._events.get())) is None
    assert actor.kills == 1
    assert group._lives == {0: "life 1"}
    outcome = await group._carry_out(group._decide(await group._events.get()))
    assert outcome is not None
    assert not outcome.is_success
    await asyncio.wait(group._watchers.values())


async def test_an_environment_that_cannot_be():
    with pytest.raises(arpc.ConfigurationError, match="'OMP_NUM_THREADS': 1"):
        await arpc.launch.ray("script.py", workers=1, environment={"OMP_NUM_THREADS": 1})
