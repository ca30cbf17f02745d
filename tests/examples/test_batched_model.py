from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent.parent
COMMAND: Final = [sys.executable, str(ROOT / "examples" / "batched_model.py"), "--callers", "8", "--calls", "2"]


def test_both_ways_give_the_same_answer():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(COMMAND, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    answer = re.match(r"the same answer: True\ndigits right: (\d+\.\d)%\n", done.stdout)
    assert answer is not None, done.stdout
    assert float(answer[1]) > 90
    assert len(re.findall(r"^8 callers, .*:  +[\d,]+ calls/s, +[\d,]+ us", done.stdout, re.MULTILINE)) == 2
