"""A worker outlives a peer that lies about its tensors."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("allow", [pytest.param("", id="anything"), "exported"])
def test_a_worker_lives_on(allow):
    command = [sys.executable, "-W", "ignore", "-m", "tests.agent.lying_peer", allow]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("alive\n")
