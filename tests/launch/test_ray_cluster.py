"""What becomes of a group on Ray when Ray itself fails: told without a cluster, by an actor that is none."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import arpc
from arpc.launch.plan import as_group
from arpc.launch.ray_cluster import RayGroup, _Exited
from arpc.launch.ray_worker import End


class ActorError(Exception):
    pass


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    exceptions = ModuleType("ray.exceptions")
    exceptions.RayActorError = ActorError
    for name, module in {"ray": ModuleType("ray"), "ray.exceptions": exceptions}.items():
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
        (ActorError("node is gone"), End(-9, "Ray lost the actor: node is gone", is_lost=True)),
        (ValueError("not found"), End(1, "Ray could not run the worker: not found")),
    ],
)
async def test_every_error_is_the_end_of_a_worker(engine: None, error: Exception, end: End):
    group = RayGroup(as_group(1), "script.py", (), 0, 1.0)
    group._actors.append(Actor(error))
    await group._watch(0, {})
    assert group._events.get_nowait() == _Exited(0, end)


async def test_an_environment_that_cannot_be():
    with pytest.raises(arpc.ConfigurationError, match="'OMP_NUM_THREADS': 1"):
        await arpc.launch.ray("script.py", workers=1, environment={"OMP_NUM_THREADS": 1})
