"""A soak of some seconds, with every kind of operation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.soak.operations import FAMILIES
from tests.integration.processes import run_scripts


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("runtime_directory")
def test_a_short_soak_finds_nothing(tmp_path: Path):
    figures = tmp_path / "soak.json"
    options = ["--seconds", "6", "--seed", "7", "--workers", "3", "--tasks", "1", "--calm", "0.5", "--no-network"]
    (soak,) = run_scripts(["-m", "scripts.soak", *options, "--json", str(figures)], limit_s=280)
    assert soak.returncode == 0, soak.stdout
    assert "seed 7" in soak.stdout
    assert "everything is as promised" in soak.stdout
    told = json.loads(figures.read_text())
    assert sum(told["faults"].values()) > 0
    assert told["complaints"] == {}
    kinds = told["kinds"]
    assert len(kinds) > len(FAMILIES)
    assert sum(kind["count"] for kind in kinds.values()) > 100
