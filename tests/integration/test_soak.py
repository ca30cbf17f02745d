"""A soak of a few seconds: the whole of it works, and everything adds up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.processes import run_scripts


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("runtime_directory")
def test_a_short_soak_adds_up(tmp_path: Path):
    figures = tmp_path / "soak.json"
    options = ["--seconds", "2", "--seed", "7", "--workers", "2", "--tasks", "1", "--calm", "0.5", "--no-network"]
    (soak,) = run_scripts(["-m", "scripts.soak", *options, "--json", str(figures)], limit_s=150)
    assert soak.returncode == 0, soak.stdout
    assert "seed 7" in soak.stdout
    assert "everything adds up" in soak.stdout
    told = json.loads(figures.read_text())
    assert sum(told["faults"].values()) > 0
    assert sum(sum(outcomes.values()) for outcomes in told["outcomes"].values()) > 10
