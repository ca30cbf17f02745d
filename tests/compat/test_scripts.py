"""Scripts that know nothing of arpc, run by ``python -m arpc.compat``: in the style of torch's tutorials."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import clients

SCRIPTS = Path(__file__).parent / "scripts"
COMPAT = [sys.executable, "-m", "arpc.compat"]
LIMIT_S = 200
"""Processes that import torch take long on a machine that is busy."""

pytestmark = pytest.mark.timeout(2 * LIMIT_S + 20)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=clients.environment(),
        cwd=clients.ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_a_script_that_spawns_its_workers() -> None:
    (port,) = clients.free_ports(1)
    done = run(*COMPAT, str(SCRIPTS / "parameter_server.py"), str(port))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("trained, ")
    assert "torch.distributed.rpc is arpc" in done.stderr


def test_a_script_under_torchrun() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run(*launcher, "-m", "arpc.compat", "-q", str(SCRIPTS / "batch_rpc.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("gathered ")
    assert "arpc" not in done.stderr


def test_the_results_are_those_of_torch() -> None:
    pytest.importorskip("torch._C._distributed_rpc", reason="this torch has no RPC of its own to compare with")
    on_torch, on_arpc = (clients.run(backend, clients.SELF_WRITTEN, LIMIT_S) for backend in clients.BACKENDS)
    rows = [clients.Row(name, "torch", on_torch[name], on_arpc[name]) for name in clients.SELF_WRITTEN]
    if again := [row.program for row in rows if row.verdict == "fails on torch"]:  # which says nothing about arpc
        on_torch = {**on_torch, **clients.run("torch", again, LIMIT_S)}
        rows = [clients.Row(name, "torch", on_torch[name], on_arpc[name]) for name in clients.SELF_WRITTEN]
    assert [(row.program, row.verdict) for row in rows] == [(row.program, "same") for row in rows], rows
    assert all(any(row.arpc.results.values()) for row in rows), "each program tells something"


def test_a_script_that_is_not_there() -> None:
    done = run(*COMPAT, "nothing.py")
    assert done.returncode == 1
    assert "can't open file 'nothing.py'" in done.stderr
