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

ROOT: Final = Path(__file__).resolve().parent.parent.parent
COMMAND: Final = [sys.executable, "-u", str(ROOT / "examples" / "parameter_server.py"), "--trainers", "2"]
ENVIRONMENT: Final = {**os.environ, "PYTHONPATH": str(ROOT)}

# the launcher, and then four processes at once, import torch
pytestmark = pytest.mark.timeout(170)


def test_loss_falls_and_accuracy_rises():
    done = subprocess.run(
        [*COMMAND, "--steps", "100"], env=ENVIRONMENT, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    reports = re.findall(
        r"^\[driver0\] +(\d+) gradients   loss (\d+\.\d+)   accuracy +(\d+\.\d+)%$", done.stdout, re.MULTILINE
    )
    pushes, losses, accuracies = ([float(value) for value in column] for column in zip(*reports, strict=True))
    assert (pushes[0], pushes[-1]) == (0, 200)
    assert pushes == sorted(pushes)
    assert losses[-1] < 0.75 * losses[0]
    assert accuracies[-1] > accuracies[0] + 15
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
    assert len(workers) == 5  # driver, server and trainers, and who keeps them
    assert [worker for worker in workers if worker.is_running()] == []
    assert errors == ""
