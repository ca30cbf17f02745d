"""The files beside this one are for type checkers: `assert_type` says what they know, `type: ignore` what they refuse.

mypy always reads them, and pyright where it is installed (``npm install --global pyright``).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mypy import api

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SNIPPETS = sorted(path.name for path in HERE.glob("*.py") if not path.name.startswith("test_"))
# Not the project's own, which reads the whole of arpc for errors of its own
CONFIGURATION = """
[mypy]
strict = true
follow_imports = silent
explicit_package_bases = true
"""


def check_with_mypy(folder: Path) -> str:
    configuration = folder / "mypy.ini"
    configuration.write_text(CONFIGURATION)
    arguments = ["--config-file", str(configuration), "--cache-dir", str(folder / "cache")]
    report, errors, status = api.run([*arguments, *(str(HERE / name) for name in SNIPPETS)])
    return report + errors if status else ""


def check_with_pyright(_: Path) -> str:
    """The first line of each file says how strict it is to be."""
    command = ["pyright", "--pythonpath", sys.executable, *(str(HERE / name) for name in SNIPPETS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


CHECKERS = [check_with_mypy, *([check_with_pyright] if shutil.which("pyright") else [])]


@pytest.mark.parametrize("check", CHECKERS)
def test_types_are_as_written(check: Callable[[Path], str], tmp_path: Path) -> None:
    assert check(tmp_path) == ""
