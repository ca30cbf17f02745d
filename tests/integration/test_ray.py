"""A Ray cluster of four nodes on this machine, and groups of workers on it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from arpc.extras import install_command
from tests.integration.processes import run_scripts

SCRIPT = str(Path(__file__).parent / "scripts" / "on_ray.py")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason=f"Ray is not installed: {install_command('ray')}"
)


@pytest.mark.timeout(290)  # it starts a cluster, and a dozen processes that import torch
@pytest.mark.usefixtures("runtime_directory")
def test_groups_on_a_cluster_of_several_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    (ended,) = run_scripts([SCRIPT, str(tmp_path)], limit_s=280.0)
    assert ended.returncode == 0
    lines = ended.stdout.splitlines()
    heard = ["hello from ps0", "hello from trainer0"]
    assert f"function: {[heard, heard]} 0" in lines
    assert "spread: 2 [('0', '0'), ('0', '1')]" in lines
    assert "restarted: {'worker0': '1', 'worker1': '1'} 1" in lines
    assert "failed: worker 'worker0' (rank 0) ended with exit code 1 | ValueError: on purpose" in lines
    assert "lost a node: 1 True 2" in lines
    assert "room for two again" in lines
    assert "command: 0" in lines
    for rank in (0, 1):
        assert f"worker{rank} of ['worker0', 'worker1'] heard 2 processes" in ended.stdout
