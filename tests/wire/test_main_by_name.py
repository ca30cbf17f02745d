"""What ``__main__`` defines: by name if the peer runs the same script, so that its globals are the peer's own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from arpc.errors import SerializationError
from arpc.wire.values.pickler import Pickler, loads
from arpc.wire.values.reducers import MAIN_NAMES, importable_name

# the script imports arpc from where this test did
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

SCRIPT = """
import functools

worker = {worker!r}

def whoami():
    return worker

def helper():
    return whoami()

@functools.lru_cache
def cached():
    return worker

class Config:
    def __init__(self, value=0):
        self.value = value

    def where(self):
        return worker

    class Nested:
        pass

def make():
    return lambda: (worker, whoami())
"""


def script(worker: str, name: str = "__main__") -> ModuleType:
    module = ModuleType(name)
    exec(SCRIPT.format(worker=worker), vars(module))
    return module


def become(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Let this process run another script; one that multiprocessing started has it under two names."""
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.delitem(sys.modules, "__mp_main__", raising=False)
    if module.__name__ == "__mp_main__":
        monkeypatch.setitem(sys.modules, "__mp_main__", module)


@pytest.fixture(params=[(a, b) for a in MAIN_NAMES for b in MAIN_NAMES], ids=" to ".join)
def send(request, monkeypatch):
    """Sends something from one worker to another that runs the same script, either of them started in any way."""
    here, there = script("here", request.param[0]), script("there", request.param[1])

    def send_(choose: Any, *, main_by_value: bool = False) -> Any:
        become(monkeypatch, here)
        payload, slots = Pickler().dumps(choose(here), main_by_value=main_by_value)
        become(monkeypatch, there)
        return loads(payload, slots)

    send_.here, send_.there = here, there
    return send_


def test_functions_and_classes_are_the_peers_own(send):
    assert send(lambda main: main.whoami) is send.there.whoami
    assert send(lambda main: main.Config) is send.there.Config
    assert send(lambda main: main.Config.Nested) is send.there.Config.Nested
    assert send(lambda main: main.Config.where) is send.there.Config.where
    assert send(lambda main: main.whoami)() == "there"


def test_objects_of_its_classes_are_of_the_peers_classes(send):
    arrived = send(lambda main: [main.Config(5), main.Config(6).where])

    assert type(arrived[0]) is send.there.Config
    assert arrived[0].value == 5
    assert arrived[1]() == "there"


def test_other_callables_of_the_script_are_the_peers_own(send):
    assert send(lambda main: main.cached) is send.there.cached


def test_lambdas_travel_by_value_and_what_they_call_by_name(send):
    arrived = send(lambda main: main.make())

    # a variable is a value; a function is known by its name
    assert arrived() == ("here", "there")


def test_by_value_everything_comes_along(send):
    helper, config, nested = send(lambda main: [main.helper, main.Config(7), main.Config.Nested], main_by_value=True)

    assert helper() == "here"
    assert type(config) is not send.there.Config
    assert config.value == 7
    assert config.where() == "here"
    assert nested is not send.there.Config.Nested


def test_what_came_by_value_can_be_sent_on(send):
    helper = send(lambda main: main.helper, main_by_value=True)

    for main_by_value in (True, False):
        again = send(lambda _: helper, main_by_value=main_by_value)
        assert again() == "here"


def test_by_value_and_by_name_may_alternate(send):
    for main_by_value in (True, False, True, False):
        arrived = send(lambda main: main.whoami, main_by_value=main_by_value)
        assert arrived() == ("here" if main_by_value else "there")


def test_a_script_that_lacks_the_name_says_what_to_do(monkeypatch):
    here, there = script("here"), ModuleType("__main__")
    there.__file__ = "/other.py"
    become(monkeypatch, here)
    payload, _ = Pickler().dumps(here.Config.where)
    become(monkeypatch, there)

    with pytest.raises(SerializationError, match=r"'Config.where' is not in .* __main__ \(/other.py\).*Define it"):
        loads(payload, [])


def test_names_of_the_script(monkeypatch):
    here = script("here")
    become(monkeypatch, here)

    assert importable_name(here.whoami) == ("__main__", "whoami")
    assert importable_name(here.cached) == ("__main__", "cached")
    assert importable_name(here.make()) is None


def test_tensors_among_the_globals_come_along_by_value(monkeypatch):
    here = script("here")
    exec("import torch\nweight = torch.ones(3)\ndef use():\n    return weight.sum()", vars(here))
    become(monkeypatch, here)
    payload, slots = Pickler().dumps(here.use, main_by_value=True)
    assert slots == [here.weight]

    assert loads(payload, [torch.zeros(3)])() == 0


REAL_SCRIPT = """
import multiprocessing
import sys

from arpc.wire.values.pickler import Pickler, loads

role = "child" if __name__ == "__mp_main__" else "parent"

def whoami():
    return role

class Box:
    pass

def child(payload, answers):
    function, box = loads(payload, [])
    assert function is whoami, function
    assert type(box) is Box
    answers.put((function(), Pickler().dumps([whoami, Box()])[0], Pickler().dumps(whoami, main_by_value=True)[0]))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=child, args=(Pickler().dumps([whoami, Box()])[0], answers))
    process.start()
    answer, by_name, by_value = answers.get(timeout=50)
    process.join()
    function, box = loads(by_name, [])
    assert function is whoami
    assert type(box) is Box
    print(answer, function(), loads(by_value, [])())
"""


def test_a_script_and_its_spawned_child_understand_each_other(tmp_path: Path):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(REAL_SCRIPT))

    done = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, check=False, timeout=55, env=ENVIRONMENT
    )

    assert done.stdout == "child parent child\n", done.stderr
