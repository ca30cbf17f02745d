"""``make matrix``: the tests on every supported Python that this machine has.

Each runs with the newest torch; the oldest Python also with the oldest torch that is supported and with the pinned one.
Which these are is read from pyproject.toml and constraints.txt. A Python that is not found is skipped::

    make matrix                                               # everything
    make matrix MATRIX_ARGS="--list"                          # what there is
    make matrix MATRIX_ARGS="-k oldest -- tests/wire -x"      # a part of it; what follows -- is for pytest
    make matrix MATRIX_ARGS="-s fallbacks"                    # what is installed, without undocumented APIs
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
PYTHONS = nox.project.python_versions(PROJECT)
CONSTRAINTS = (ROOT / "constraints.txt").read_text().splitlines()
OLDEST = next(found for one in PROJECT["project"]["dependencies"] if (found := re.fullmatch(r"torch>=([\d.]+)", one)))
PINNED = next(line for line in CONSTRAINTS if line.startswith("torch=="))
TORCHES = {"oldest": f"torch=={OLDEST[1]}.*", "pinned": PINNED, "newest": "torch"}

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["tests"]
nox.options.error_on_missing_interpreters = False
nox.options.stop_on_first_error = False

# pyenv keeps its interpreters apart, and puts scripts on the path that run whichever is chosen
pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
kept = [str(folder) for version in PYTHONS for folder in sorted(pyenv.glob(f"{version}.*/bin"), reverse=True)]
os.environ["PATH"] = os.pathsep.join([*kept, os.environ.get("PATH", "")])


@nox.session(venv_backend="none")
def fallbacks(session: nox.Session) -> None:
    """Run the tests without the undocumented APIs of asyncio and torch, in the environment that nox is installed in."""
    environment = {"ARPC_PUBLIC_APIS": "1"}
    session.run("python", "-m", "pytest", "--dist", "loadfile", *(session.posargs or ("-n", "2")), env=environment)


@nox.session
@nox.parametrize(
    ("python", "torch"),
    [*((PYTHONS[0], name) for name in ("oldest", "pinned")), *((version, "newest") for version in PYTHONS)],
)
def tests(session: nox.Session, torch: str) -> None:
    """Install arpc with one torch, and run the tests."""
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text("\n".join(line for line in CONSTRAINTS if not line.startswith("torch==")))
    session.install("-c", str(constraints), TORCHES[torch], "-e", ".[dev]", *os.environ.get("INSTALL_ARGS", "").split())
    session.run("python", "-c", "import sys, torch; print(sys.version, torch.__version__)")
    processes = os.environ.get("TEST_PROCESSES", "2")
    session.run("python", "-m", "pytest", "-n", processes, "--dist", "loadfile", *session.posargs)
