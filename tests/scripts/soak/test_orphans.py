"""Children of workers that were killed: the runner adopts them and waits for their end."""

from __future__ import annotations

import subprocess
import sys

import pytest

# adopting is for a whole process, and for good: this needs one of its own
_PROGRAM = """
import os, sys, time
from scripts.soak.orphans import Orphans

orphans = Orphans()
child = os.fork()
if child == 0:
    if os.fork() == 0:
        time.sleep(float(sys.argv[1]))
        os._exit(0)
    os._exit(0)
os.waitpid(child, 0)
print(orphans.reap(float(sys.argv[2])), orphans.reap(0))
"""


@pytest.mark.parametrize(("lives_s", "limit_s", "late"), [("0.2", "30", 0), ("600", "0.2", 1)])
def test_orphans_are_reaped(lives_s: str, limit_s: str, late: int):
    command = [sys.executable, "-c", _PROGRAM, lives_s, limit_s]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(late), "0"]
