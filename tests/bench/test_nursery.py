"""Processes that import nothing slow, started next to each other."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from arpc.bench.nursery import Nursery, Offspring
from arpc.launch.supervisor_process import SCRIPT as SUPERVISOR

PROGRAM = """
import os, sys
print(os.environ["WORDS"], sys.argv[1:], os.getsid(0) == os.getpid(), flush=True)
print("logged", file=sys.stderr)
sys.exit(len(sys.stdin.read()))
"""


@pytest.fixture
async def nursery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Nursery]:
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    made = await Nursery.open(warm=False)
    yield made
    await made.aclose()


async def start(nursery: Nursery, log: Path, *words: str) -> Offspring:
    with log.open("wb") as file:
        return await nursery.start("program", words, {"WORDS": "its own"}, file, fork=True)


async def test_they_have_their_words_variables_and_log_and_tell_how_they_end(nursery: Nursery, tmp_path: Path) -> None:
    logs = [tmp_path / str(number) for number in range(3)]
    children = await asyncio.gather(*(start(nursery, log, log.name) for log in logs))
    assert len({child.pid for child in children} - {0, os.getpid()}) == 3
    for child, log in zip(children, logs, strict=True):
        assert await child.reader.readline() == f"its own ['{log.name}'] True\n".encode()
        assert child.returncode is None
        child.writer.write(b"four")
        child.writer.write_eof()
        await child.wait()
        assert child.returncode == 4
        assert log.read_text() == "logged\n"


async def test_who_waits_for_one_is_told_when_all_end(nursery: Nursery, tmp_path: Path) -> None:
    child = await start(nursery, tmp_path / "log")
    await nursery.aclose()
    assert not psutil.pid_exists(child.pid)
    await child.wait()
    assert child.returncode == -9
    assert child.writer.is_closing()


async def test_when_the_supervisor_is_killed_all_have_ended(nursery: Nursery, tmp_path: Path) -> None:
    child = await start(nursery, tmp_path / "log")
    process = psutil.Process(child.pid)
    (supervisor,) = (one for one in psutil.Process().children() if str(SUPERVISOR) in one.cmdline())
    supervisor.kill()
    await child.wait()
    assert "was killed" in child.problem
    assert psutil.wait_procs([process], timeout=60)[1] == []
    assert "was killed" in (await start(nursery, tmp_path / "log")).problem
