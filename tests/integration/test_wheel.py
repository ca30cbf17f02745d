"""What is published works where nothing else of this folder can be found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.timeout(170)
def test_the_wheel_is_complete(tmp_path):
    command = [sys.executable, "-m", "scripts.check_wheel", "--no-isolation", "--outdir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".gz", ".whl"]
    assert f"{next(tmp_path.glob('*.whl'))} works" in done.stdout
