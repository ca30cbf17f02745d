"""The fuzzing of descriptions that lie: a slice of it, and a proof that it finds what it looks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from scripts.metadata.lies import lie
from scripts.metadata.valid import valid_inputs

ABORTING = """
import os
import arpc.wire.values.layouts as read

check, refused = read.check_strided, []


def check_or_abort(*args):
    try:
        check(*args)
    except Exception:
        refused.append(args)
        if len(refused) == 10:
            os.abort()
        raise


read.check_strided = check_or_abort
"""
"""A reader with a flaw. Not one without the check: whether torch then aborts depends on its version."""

ARGUMENTS = ("--seed", "1", "--found")


def fuzz(directory: Path, runs: int, *, before: str = "") -> subprocess.CompletedProcess[str]:
    program = f"import sys\n{before}\nfrom scripts.metadata.__main__ import main\nsys.exit(main())"
    command = [sys.executable, "-W", "ignore", "-c", program, *ARGUMENTS, str(directory), "--runs", str(runs)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_nothing_is_found(tmp_path):
    done = fuzz(tmp_path, 3000)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "number_of_executed_units: 3000" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_an_abort_is_found_and_the_run_goes_on(tmp_path):
    done = fuzz(tmp_path, 300, before=ABORTING)

    assert done.returncode == 1
    assert "killed by SIGABRT" in done.stdout
    assert "number_of_executed_units: 300" in done.stdout
    assert "Input(way=" in next(tmp_path.iterdir()).read_text()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about layouts it still works on
def test_a_lie_can_be_told_again():
    for true in valid_inputs():
        before = repr(true)
        lies = [lie(true, Random(7)) for _ in range(2)]
        assert lies[0] == lies[1]
        assert repr(true) == before
