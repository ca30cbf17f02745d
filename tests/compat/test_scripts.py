"""Scripts that know nothing of arpc, run by ``python -m arpc.compat``: in the style of torch's tutorials."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
COMPAT = [sys.executable, "-m", "arpc.compat"]
LIMIT_S = 200
"""Processes that import torch take long on a machine that is busy."""

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


@contextmanager
def free_ports(count: int) -> Iterator[list[str]]:
    """Ports that nobody else listens on. The next one to each is free as well."""
    with ExitStack() as stack:
        found: list[str] = []
        while len(found) < count:
            first, second = (stack.enter_context(socket.socket()) for _ in range(2))
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            found.append(str(port))
    yield found


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "USE_LIBUV": "0"}
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def test_a_script_that_spawns_its_workers() -> None:
    with free_ports(1) as ports:
        done = run(*COMPAT, str(SCRIPTS / "parameter_server.py"), *ports)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("trained, ")
    assert "torch.distributed.rpc is arpc" in done.stderr


def test_a_script_under_torchrun() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run(*launcher, "-m", "arpc.compat", "-q", str(SCRIPTS / "batch_rpc.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "gathered\n"
    assert "arpc" not in done.stderr


def test_modules_that_follow_one_another() -> None:
    with free_ports(4) as ports:
        done = run(*COMPAT, "-q", "-m", "tests.compat.scripts.several", *ports)
    assert done.returncode == 0, done.stderr
    # Gloo of torch 2.8 reports its connections there
    printed = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert printed == ["flowed", "learned", "rewarded", "in parallel"]


def test_a_script_that_is_not_there() -> None:
    done = run(*COMPAT, "nothing.py")
    assert done.returncode == 1
    assert "can't open file 'nothing.py'" in done.stderr
