"""A sample of torch's own RPC tests, over all capabilities, on the drop-in. ``make conformance`` runs all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.conformance_lists import EXCLUDED, SAMPLE, capability_of

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 280


def test_the_sample_has_some_of_each_capability_and_nothing_that_is_excluded() -> None:
    assert len({capability_of(name) for name in SAMPLE}) == 17
    assert not set(SAMPLE) & set(EXCLUDED)


@pytest.mark.timeout(LIMIT_S + 20)
def test_the_sample_passes(tmp_path: Path) -> None:
    pytest.importorskip("expecttest", reason="torch's tests need it")
    out = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "scripts.conformance", "--sample", "--out", str(out)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    results = [json.loads(line) for line in out.read_text().splitlines()]
    failed = {result["test"]: result["text"] for result in results if result["status"] != "pass"}
    assert not failed, "\n".join(f"{name}\n{text}" for name, text in failed.items())
    assert {result["test"] for result in results} == set(SAMPLE), done.stdout + done.stderr
    assert done.returncode == 0
