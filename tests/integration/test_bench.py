"""``arpc bench``, once through all its parts. What it measures is of no interest here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROWS = "call/async/unix/same,raw/call/unix/same,workers/p50_us/4"


@pytest.mark.timeout(120)
def test_the_command_measures_reports_and_leaves_its_figures(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    asked = ("--quick", "--rounds", "1", "--rows", ROWS, "--systems", "arpc,floor,raw", "--json", str(figures))
    done = subprocess.run(
        [sys.executable, "-m", "arpc", "bench", *asked], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "How it was measured" in done.stdout
    document = json.loads(figures.read_text())
    assert document["failures"] == {}
    rows = {row["key"]: row for row in document["rows"]}
    assert rows.keys() == set(ROWS.split(","))
    for row in rows.values():
        assert row["columns"].keys() == {"arpc", "floor"}
        assert all(column["median"] > 0 for column in row["columns"].values())
        assert row["ratios"]["floor"]["quotient"] > 0
    assert rows["call/async/unix/same"]["columns"]["arpc"]["placement"] == "same"
