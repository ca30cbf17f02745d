"""Scripts as users run them: functions of ``__main__``, ways to start processes, and ends that were not planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.processes import run_scripts

SCRIPTS = Path(__file__).parent / "scripts"
FIRST = str(SCRIPTS / "first_main.py")
OTHER = str(SCRIPTS / "other_main.py")
HASTY = str(SCRIPTS / "hasty.py")

pytestmark = pytest.mark.usefixtures("runtime_directory")


def found_by(results: Path, rank: int) -> dict[str, object]:
    return json.loads((results / f"{rank}.json").read_text())


def check_by_reference(results: Path) -> None:
    """Both run the same script, so that its functions mean the peer's own, with the peer's own globals."""
    for rank in (0, 1):
        peer = f"worker{1 - rank}"
        assert found_by(results, rank) == {
            "own name": f"worker{rank}",
            "plain": peer,
            "async": peer,
            "bumps": [1, 2],
            "own bumps": 2,
            "class is ours": True,
            "method": f"sent on {peer}",
            "exception": "on purpose",
            "as an argument": peer,
            "lambda": 42,
            "closure": [2.0, 2.0],
        }


@pytest.fixture
def init_method(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'store'}"


def test_functions_of_main_in_processes_of_one_script(tmp_path: Path, init_method: str):
    ended = run_scripts(*([FIRST, "plain", rank, init_method, str(tmp_path)] for rank in "01"))
    assert [one.returncode for one in ended] == [0, 0]
    check_by_reference(tmp_path)


def test_functions_of_main_in_spawned_processes(tmp_path: Path, init_method: str):
    (ended,) = run_scripts([FIRST, "spawn", init_method, str(tmp_path)])
    assert ended.returncode == 0
    check_by_reference(tmp_path)


def test_functions_of_main_under_torchrun(tmp_path: Path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    (ended,) = run_scripts([*torchrun, FIRST, "torchrun", str(tmp_path)])
    assert ended.returncode == 0
    check_by_reference(tmp_path)


def test_functions_of_main_go_by_value_to_another_script(tmp_path: Path, init_method: str):
    ended = run_scripts([FIRST, "plain", "0", init_method, str(tmp_path)], [OTHER, "1", init_method])
    assert [one.returncode for one in ended] == [0, 0]
    found = found_by(tmp_path, 0)
    # with the caller's globals, as they were when it called
    assert found["plain"] == found["async"] == found["as an argument"] == "worker0"
    assert found["method"] == "sent on worker0"
    assert found["own bumps"] == 0
    assert found["class is ours"] is True
    assert found["exception"] == "on purpose"
    assert (found["lambda"], found["closure"]) == (42, [2.0, 2.0])


def test_a_process_that_ends_without_a_shutdown_leaves_no_socket(tmp_path: Path, runtime_directory: Path):
    ways = ("exit", "raise")
    ended = run_scripts(*([HASTY, how, f"file://{tmp_path / how}"] for how in ways))
    assert [one.returncode for one in ended] == [3, 1]
    assert all(one.stdout.startswith("unix://") for one in ended)
    assert list(runtime_directory.glob("*/*.sock")) == []
    assert "RuntimeError: enough" in ended[1].stdout
