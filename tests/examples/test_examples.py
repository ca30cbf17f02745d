"""Every example runs by the command it names, at a small size, and comes to its result."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import torch

ROOT: Final = Path(__file__).resolve().parent.parent.parent
EXAMPLES: Final = ROOT / "examples"
ENVIRONMENT: Final = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

# what makes it small, and what it prints in the end
RUNS: Final = {
    "reinforcement_learning": ("--updates 12 --plot {folder}/p.png", r"balanced for \d+ -> \d+ of 200 steps"),
    "split_transformer": (
        "--steps 30 --plot {folder}/p.png",
        r"loss (\d+\.\d+) -> (\d+\.\d+), \d+\.\d% of the digits right",
    ),
    "pipeline": ("--steps 1 --batch 256 --trace {folder}/trace.html", r"^(?:\[\w+\] )? +8 +\d+\.\d ms +\d+%$"),
    "streaming_inference": ("--steps 5 --length 20", r"the server computed (\d+) of 100,000"),
    "hogwild": ("--steps 15 --plot {folder}/p.png", r"without +\d+\.\d{4} +\d+\.\d{4} +\d+$"),
    "embedding_ddp": ("--steps 15", r"the copies are equal"),
    "fault_tolerant": ("--trainers 2 --steps 60 --kills 1", r"in \d+\.\d s, 120 gradients$"),
    "federated": ("--rounds 3 --stay 2 --pace 0.1", r"accuracy \d+\.\d% -> \d+\.\d%, \d+\.\d% at best"),
}

# several processes import torch at once
pytestmark = pytest.mark.timeout(200)


def shown_in(path: Path) -> str:
    """The command that the example's own first lines, and its help, show."""
    shown = re.search(r"^    (arpc launch .*|python .*)$", path.read_text(), re.MULTILINE)
    assert shown is not None
    return shown[1]


def command_of(name: str) -> list[str]:
    program, *arguments = shlex.split(shown_in(EXAMPLES / f"{name}.py"))
    return [sys.executable, *(["-m", "arpc"] if program == "arpc" else []), *arguments]


def test_all_are_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        *RUNS,
        "batched_model",
        "parameter_server",
        "trace_training",
    }


def test_all_are_on_the_page():
    page = (ROOT / "docs" / "examples.md").read_text()
    assert set(re.findall(r"\(\.\./examples/(\w+\.\w+)\)", page)) == {
        path.name for path in EXAMPLES.iterdir() if path.suffix in {".py", ".ipynb"}
    }


def test_the_page_shows_the_command_of_each():
    page = (ROOT / "docs" / "examples.md").read_text()
    shown = re.findall(r"^(?:arpc|python) .*examples/(\w+)\.py.*$", page, re.MULTILINE)
    assert sorted(shown) == sorted(path.stem for path in EXAMPLES.glob("*.py"))
    assert all(shown_in(path) in page for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", RUNS)
def test_it_comes_to_its_result(name, tmp_path):
    small, result = RUNS[name]
    command = [*command_of(name), *shlex.split(small.format(folder=tmp_path))]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=180, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(result, done.stdout, re.MULTILINE), done.stdout
    assert ("--plot" in small) == (tmp_path / "p.png").exists()


def test_every_plot_has_a_title_and_names_its_axes():
    for path in EXAMPLES.glob("*.py"):
        source = path.read_text()
        plots = source.count("axes.set(") + source.count("left.set(") + source.count("right.set(")
        assert plots >= source.count("savefig(")
        for name in ("title=", "xlabel=", "ylabel="):
            assert len(re.findall(rf"\b{name}", source)) >= plots
    notebook = (EXAMPLES / "tour.ipynb").read_text()
    assert [notebook.count(f"plt.{name}(") for name in ("plot", "title", "xlabel", "ylabel")] == [1, 1, 1, 1]


@pytest.fixture
def cart_pole():
    """The example as a module, with one thread as it has: on a busy machine several wait for each other."""
    spec = importlib.util.spec_from_file_location("reinforcement_learning", EXAMPLES / "reinforcement_learning.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield example
    torch.set_num_threads(threads)


@pytest.mark.parametrize("environment", ["own", "gymnasium"])
def test_the_pole_stays_up_longer(cart_pole, environment):
    learner = cart_pole.Learner()
    lengths = [learner.learn(cart_pole.play(environment, learner.weights, 16, seed)) for seed in range(15)]
    assert sum(lengths[-3:]) > 1.3 * sum(lengths[:3])


def test_our_own_cart_pole_follows_the_rules_of_gymnasiums(cart_pole):
    theirs, ours = cart_pole.GymnasiumCartPole(4, 0), cart_pole.OwnCartPole(4, 0)
    ours.state = theirs.look().clone()
    moves = torch.tensor([0, 1, 0, 1])
    for step in range(6):
        assert torch.equal(theirs.move(moves), ours.move(moves))
        assert torch.allclose(theirs.look(), ours.look(), atol=1e-4), step
