from __future__ import annotations

import json
import subprocess
import sys

import pytest

import arpc
from arpc.cli import main
from arpc.console.attachment import several
from arpc.console.ps import by_group, describe
from arpc.ids import WorkerInfo
from arpc.metrics import attach as module
from arpc.metrics.attach import AttachFile
from arpc.options import RpcOptions

ADDRESSES = ("unix:///tmp/x.sock",)


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "socket_directory", lambda: tmp_path)
    return tmp_path


def write(name: str, number: int, started_s: float, group: str, http: str | None = None) -> None:
    AttachFile.write(WorkerInfo(name, number), ADDRESSES, http, RpcOptions(), started_s, group)


def test_groups_are_listed_the_newest_first(capsys: pytest.CaptureFixture[str]) -> None:
    write("ps0", 0, 100.0, "127.0.0.1:1000", "http://127.0.0.1:8265")
    write("trainer0", 1, 101.0, "127.0.0.1:1000")
    write("worker0", 0, 150.0, "127.0.0.1:2000")
    groups = by_group(module.attachable())
    pid = groups[0][0].pid
    assert list(describe(groups, 160.0)) == [
        "group 127.0.0.1:2000: 1 worker here, 10 s",
        f"  worker0  id 0  process {pid}",
        "group 127.0.0.1:1000: 2 workers here, 1 min, dashboard http://127.0.0.1:8265",
        f"  ps0       id 0  process {pid}",
        f"  trainer0  id 1  process {pid}",
    ]
    assert main(["ps", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [[worker["name"] for worker in group] for group in shown] == [["worker0"], ["ps0", "trainer0"]]


def test_nobody_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps"]) == 0
    assert capsys.readouterr().out == "no worker of this user runs on this host\n"


def test_a_tool_says_which_of_several_groups_it_took() -> None:
    write("worker0", 0, 150.0, "127.0.0.1:2000")
    (taken,) = module.attachable()
    text = several(taken, 2)
    assert text.startswith("2 groups run on this host. This is the newest, of worker 'worker0'")
    assert "`arpc ps` lists them all, and --worker or --pid chooses another" in text


async def test_top_says_it_before_it_shows_anything(capsys: pytest.CaptureFixture[str]) -> None:
    write("other", 0, 1.0, "127.0.0.1:1000")
    write("worker0", 0, 2.0, "127.0.0.1:2000")
    from arpc.console.attachment import attach
    from tests.console.test_onlooker import arguments

    with pytest.raises(arpc.WireError, match="cannot be reached"):
        async with attach(arguments()) as group:
            await group.summary()
    assert "2 groups run on this host" in capsys.readouterr().err
    with pytest.raises(arpc.WireError, match="cannot be reached"):
        async with attach(arguments(worker="other")) as group:
            await group.summary()
    assert capsys.readouterr().err == ""


def test_workers_of_one_group_find_each_other_by_where_they_met(tmp_path, monkeypatch) -> None:
    monkeypatch.undo()
    program = """
import asyncio, arpc
from arpc.metrics.attach import attachable
async def main():
    async with arpc.init_rpc("alone", rank=0, world_size=1, init_method="tcp://127.0.0.1:0"):
        print([one.group for one in attachable() if one.name == "alone"])
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "127.0.0.1:0" in done.stdout, done.stderr
