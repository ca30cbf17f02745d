from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent.parent
COMMAND: Final = [sys.executable, str(ROOT / "examples" / "trace_training.py"), "--to"]


@pytest.mark.timeout(200)
def test_a_step_over_three_processes_is_one_trace(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*COMMAND, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=190, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 workers, ")
    trace = json.loads((tmp_path / "trace.json").read_text())
    errors_us = trace["otherData"]["clock_error_us"]
    assert set(errors_us) == {"trainer", "stage1", "stage2"}
    events = trace["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    ran = {(event["pid"], event["name"]) for event in slices if event["cat"] == "operator"}
    assert {(1, "aten::linear"), (2, "aten::linear"), (1, "AddmmBackward0"), (2, "AddmmBackward0")} <= ran
    assert any(pid == 1 and "Optimizer.step" in name for pid, name in ran)
    # every request and every reply goes forward in time, as far as the clocks can tell
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert len(begins) >= 20
    for number, begin in begins.items():
        assert ends[number]["ts"] >= begin["ts"] - 2 * max(errors_us.values())
    assert "aten::linear" in (tmp_path / "trace.html").read_text()
