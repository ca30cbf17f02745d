"""The workflows of the forge run targets of the Makefile, and on what pyproject.toml says is supported."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def supported_pythons() -> list[str]:
    return [found[1] for one in PROJECT["classifiers"] if (found := re.fullmatch(r".* :: Python :: (3\.\d+)", one))]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_targets_of_the_makefile(path: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = re.findall(r"^ +- run: (.*)$", path.read_text(), re.MULTILINE)
    assert commands
    assert [command for command in commands if not re.match(rf"make ({'|'.join(targets)})\b", command)] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_read_and_nothing_else(path: Path) -> None:
    text = path.read_text()
    assert re.findall(r"^( *)permissions:\n +(.*)$", text, re.MULTILINE) == [("", "contents: read")]
    assert re.search(r"^concurrency:$", text, re.MULTILINE)
    assert "://" not in text, "where packages come from is for the settings of the forge"
    actions = re.findall(r"uses: (.*)$", text, re.MULTILINE)
    assert actions
    assert [action for action in actions if not re.fullmatch(r"[\w-]+/[\w-]+@v\d+", action)] == []


def test_the_tests_run_on_every_supported_python() -> None:
    listed = [re.findall(r"python: \[(.*)\]", path.read_text()) for path in WORKFLOWS]
    assert [[f'"{version}"' for version in supported_pythons()]] == [
        found.split(", ") for one in listed for found in one
    ]
    assert PROJECT["requires-python"] == f">={supported_pythons()[0]}"


def test_the_pages_name_the_oldest_python_and_torch() -> None:
    (torch,) = (found[1] for one in PROJECT["dependencies"] if (found := re.fullmatch(r"torch>=([\d.]+)", one)))
    page = (ROOT / "docs" / "getting-started.md").read_text()
    assert f"Python {supported_pythons()[0]} or newer and PyTorch {torch} or newer" in page
