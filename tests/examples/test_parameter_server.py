from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import psutil
import pytest

from arpc.launch.forking import can_fork

ROOT: Final = Path(__file__).resolve().parent.parent.parent
COMMAND: Final = [sys.executable, "-u", str(ROOT / "examples" / "parameter_server.py"), "--trainers", "2"]
ENVIRONMENT: Final = {**os.environ, "PYTHONPATH": str(ROOT)}

# the launcher, and then four processes at once, import torch
pytestmark = pytest.mark.timeout(170)


def test_loss_falls_and_accuracy_rises(tmp_path):
    plot = tmp_path / "new" / "ps.png"
    command = [*COMMAND, "--steps", "100", "--plot", plot]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for mode in ("sync", "async", "batch"):
        reports = re.findall(
            rf"^\[driver0\] {mode} +\[#* *\] +(\d+) gradients   loss (\d+\.\d+)   accuracy +(\d+\.\d+)%$",
            done.stdout,
            re.MULTILINE,
        )
        pushes, losses, accuracies = ([float(value) for value in column] for column in zip(*reports, strict=True))
        assert pushes[-1] == 200
        assert pushes == sorted(pushes)
        assert losses[-1] < 0.85 * losses[0]
        assert accuracies[-1] > accuracies[0] + 10
    rows = re.findall(r"^\[driver0\] (\w+) +(\d+) +\d+\.\d", done.stdout, re.MULTILINE)
    updates = {mode: int(number) for mode, number in rows}
    assert updates["sync"] == 100  # one of both trainers' gradients
    assert updates["async"] == 200  # one of each
    assert 100 <= updates["batch"] <= 200
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert re.search(r"^\[driver0\] [\d,]+ calls/s, [\d,]+ MB/s$", done.stdout, re.MULTILINE)


def test_interrupt_ends_every_process():
    with subprocess.Popen(
        [*COMMAND, "--steps", "1000000"], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as driver:
        try:
            assert driver.stdout is not None
            assert driver.stderr is not None
            for line in driver.stdout:
                if "gradients" in line:  # the group is complete, and at work
                    break
            workers = psutil.Process(driver.pid).children(recursive=True)
            driver.send_signal(signal.SIGINT)
            errors = driver.stderr.read()
            assert driver.wait(timeout=20) == 130
        finally:
            driver.kill()
    # driver, server and trainers, who keeps them, and what they are forked from
    assert len(workers) == 5 + can_fork()
    assert [worker for worker in workers if worker.is_running()] == []
    assert errors == ""
