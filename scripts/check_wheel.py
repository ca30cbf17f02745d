"""Builds the source distribution and the wheel, and tries the wheel where nothing else of this folder is on the path.

    python -m scripts.check_wheel --outdir dist

The wheel is built from the source distribution, so both are complete. It is installed into a new environment, which
takes the dependencies of arpc, but not arpc, from the environment of this script. The command is run there, and one
worker calls another.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
WORKER: Final = """
import arpc

async def where() -> str:
    return arpc.__file__

async def main() -> None:
    async with arpc.init_rpc() as worker:
        if worker.id == 0:
            print("called", await arpc.rpc_sync("worker1", where))

arpc.run(main)
"""


def build(outdir: Path, *, isolated: bool) -> Path:
    """Build both distributions; return the wheel."""
    command = [sys.executable, "-m", "build", "--outdir", str(outdir), str(ROOT)]
    subprocess.run(command if isolated else [*command, "--no-isolation"], check=True)
    (wheel,) = sorted(outdir.glob("*.whl"), key=lambda path: path.stat().st_mtime)[-1:]
    return wheel


def make_environment(directory: Path, wheel: Path) -> Path:
    """Make an environment with the wheel; return the folder of its programs."""
    venv.create(directory, with_pip=False)
    programs = directory / "bin"
    # the pip of this Python installs into that environment; the path file makes the dependencies of arpc importable,
    # but not the packages that path files next to them point to
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--quiet", str(wheel)], check=True)
    (packages,) = directory.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return programs


def try_out(programs: Path, directory: Path) -> None:
    """Run the command, and a group of two; exit with a message if that fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script = directory / "worker.py"
    script.write_text(WORKER)
    for arguments in (["--version"], ["launch", "-n", "2", str(script)]):
        command = [str(programs / "arpc"), *arguments]
        done = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, check=False)
        print(done.stdout, done.stderr, sep="", end="", flush=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    if str(programs.parent) not in done.stdout:
        raise SystemExit("that was not the arpc of the wheel")


def main() -> None:
    """Build, install and try the wheel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outdir", type=Path, default=ROOT / "dist", help="where the distributions go (dist)")
    parser.add_argument(
        "--no-isolation", action="store_true", help="build with what is installed, which takes hatchling"
    )
    arguments = parser.parse_args()
    wheel = build(arguments.outdir, isolated=not arguments.no_isolation)
    with tempfile.TemporaryDirectory(prefix="arpc-wheel-") as name:
        directory = Path(name)
        try_out(make_environment(directory / "environment", wheel), directory)
    print(f"{wheel} works")


if __name__ == "__main__":
    main()
