"""Programs on the pages in docs/ that are followed by their output print just that."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
PROGRAM: Final = re.compile(r"^```python\n((?:(?!^```).)*)^```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS: Final = [
    pytest.param(*match, id=f"{page.stem}-{number}")
    for page in sorted((ROOT / "docs").glob("*.md"))
    for number, match in enumerate(PROGRAM.findall(page.read_text()))
]


@pytest.mark.timeout(120)  # some start processes, each of which imports torch
@pytest.mark.parametrize(("program", "output"), PROGRAMS)
def test_it_prints_what_is_shown(program, output, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(program)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == (output, "")
