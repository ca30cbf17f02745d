"""A peer that lies about its tensors is refused, whatever way the lie comes in, and the process lives on."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.wire.lying_peers import LIES


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What came of each lie. One that aborts its process does not end this one."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.wire.lying_peers"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("lie", [f"{way}: {name}" for way, lies in LIES.items() for name in lies])
def test_a_lie_is_refused(outcomes, lie):
    assert outcomes[lie] == "refused"
