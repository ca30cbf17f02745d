from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
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
    command = [*COMMAND, "--steps", "60", "--plot", plot]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for mode in ("sync", "async", "batch"):
        reports = re.findall(
            rf"^\[driver0\] {mode} +(\d+) gradients   loss (\d+\.\d+)   accuracy +(\d+\.\d+)% .* calls/s .* MB/s$",
            done.stdout,
            re.MULTILINE,
        )
        pushes, losses, accuracies = ([float(value) for value in column] for column in zip(*reports, strict=True))
        assert pushes[-1] == 120
        assert pushes == sorted(pushes)
        assert losses[-1] < 0.5 * losses[0]
        assert accuracies[-1] > accuracies[0] + 50
    rows = re.findall(r"^\[driver0\] (\w+) +(\d+) +\d+\.\d", done.stdout, re.MULTILINE)
    updates = {mode: int(number) for mode, number in rows}
    assert updates["sync"] == 60  # one of both trainers' gradients
    assert updates["async"] == 120  # one of each
    assert 60 <= updates["batch"] <= 120
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "what to try next" in done.stdout


def test_a_trainer_that_is_killed_comes_back_and_all_is_trained():
    command = [*COMMAND, "--mode", "sync", "--steps", "40", "--pause", "20", "--kill"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "worker 'trainer1' was killed by SIGKILL: starting it again (1 of 1)\n"
    told = re.search(
        r"kill -9 (\d+): trainer1 dies.*WorkerLostError: worker 'trainer1' .*trainer1 is back, as process (\d+)",
        done.stdout,
        re.DOTALL,
    )
    assert told is not None, done.stdout
    assert told[1] != told[2]
    assert re.search(r"^\[driver0\] sync +80 gradients", done.stdout, re.MULTILINE)


def test_on_a_terminal_there_are_bars():
    bars = read_terminal([*COMMAND, "--mode", "batch", "--steps", "20"])
    assert re.search(r"\[driver0\].*batch.*━.*loss \d+\.\d+ +accuracy +\d+\.\d%.*calls/s.*MB/s", bars)
    assert "gradients" not in bars  # the lines that stand for bars elsewhere


def read_terminal(command: list[str]) -> str:
    """What a command writes to a terminal of its own, without colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 130, 0, 0))
    environment = {**ENVIRONMENT, "TERM": "xterm", "NO_COLOR": "1"}
    with subprocess.Popen(command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        written = b""
        try:
            while data := os.read(ours, 1 << 16):
                written += data
        except OSError:  # how Linux says that nobody has the other end any more
            process.wait(timeout=20)
        finally:
            os.close(ours)
            process.kill()
    text = written.decode()
    assert process.returncode == 0, text
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


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
