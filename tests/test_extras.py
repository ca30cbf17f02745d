import importlib.metadata
import json
import tomllib
from pathlib import Path

import pytest

from arpc.extras import DISTRIBUTION, install_command

ROOT = Path(__file__).resolve().parent.parent


class Installed:
    def __init__(self, origin: str | None) -> None:
        self._origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self._origin


@pytest.fixture
def installed_from(monkeypatch):
    def install(origin):
        monkeypatch.setattr(importlib.metadata, "distribution", lambda _: Installed(origin))

    return install


def test_from_a_registry(installed_from):
    installed_from(None)
    assert install_command("cli") == "pip install 'torch-arpc[cli]'"


def test_from_a_clone(installed_from):
    installed_from(json.dumps({"url": "file:///home/a%20b/arpc", "dir_info": {"editable": True}}))
    assert install_command("cli") == "pip install '/home/a b/arpc[cli]'"


@pytest.mark.parametrize(
    "origin",
    ["", "[]", "not json", '{"dir_info": {}}', '{"url": "file:///tmp/x.whl"}', '{"url": "git+ssh://somewhere/arpc"}'],
)
def test_from_elsewhere(installed_from, origin):
    installed_from(origin)
    assert install_command("cli") == "pip install 'torch-arpc[cli]'"


def test_where_it_is_not_installed(monkeypatch):
    def distribution(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    assert install_command("cli") == "pip install 'torch-arpc[cli]'"


def test_the_name_is_the_one_that_is_built():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION


def test_nothing_tells_users_to_install_the_project_of_that_name():
    told = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("arpc", "docs", "examples", "scripts", "tests")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".py", ".md", ".ipynb"} and path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "pip install arpc" in line or ("arpc[" in line.replace(f"{DISTRIBUTION}[", "") and "install" in line)
    ]
    assert not told
