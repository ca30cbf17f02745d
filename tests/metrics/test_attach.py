"""How tools find workers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from arpc.ids import WorkerInfo
from arpc.metrics import attach as module
from arpc.metrics.attach import AttachFile, attachable
from arpc.options import RpcOptions

ADDRESSES = ("unix:///tmp/x.sock", "tcp://127.0.0.1:5")


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "socket_directory", lambda: tmp_path)
    monkeypatch.delenv("ARPC_SECRET", raising=False)
    monkeypatch.delenv("ARPC_SECRET_FILE", raising=False)
    return tmp_path


def test_what_is_written_is_found_until_it_is_removed():
    file = AttachFile.write(WorkerInfo("ps", 3), ADDRESSES, "http://127.0.0.1:1", RpcOptions(), 5.0)
    (found,) = attachable()
    assert (found.name, found.id, found.pid) == ("ps", 3, os.getpid())
    assert (found.addresses, found.http, found.secret_file) == (ADDRESSES, "http://127.0.0.1:1", None)
    file.remove()
    file.remove()
    assert attachable() == []


def test_the_newest_comes_first():
    for number, started in enumerate((1.0, 3.0, 2.0)):
        AttachFile.write(WorkerInfo(f"w{number}", number), ADDRESSES, None, RpcOptions(), started)
    assert [one.name for one in attachable()] == ["w1", "w2", "w0"]


def test_nobody_else_can_read_it_and_it_holds_no_secret(directory, monkeypatch, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("swordfish")
    monkeypatch.setenv("ARPC_SECRET_FILE", str(secret))
    AttachFile.write(WorkerInfo("ps", 0), ADDRESSES, None, RpcOptions(), 1.0)
    (path,) = directory.glob("*.worker.json")
    assert path.stat().st_mode & 0o777 == 0o600
    assert "swordfish" not in path.read_text()
    assert attachable()[0].secret_file == str(secret)


def test_a_path_that_is_no_text_costs_the_file_and_not_the_worker(directory, monkeypatch):
    monkeypatch.setenv("ARPC_SECRET_FILE", "/\udcff")
    options = RpcOptions(secret=b"swordfish")
    assert AttachFile.write(WorkerInfo("ps", 0), ADDRESSES, None, options, 1.0) is None
    assert list(directory.iterdir()) == []


def test_one_that_cannot_be_reached_from_outside_writes_nothing(directory):
    assert AttachFile.write(WorkerInfo("ps", 0), ("memory://1",), None, RpcOptions(), 1.0) is None
    assert attachable() == []


def test_the_files_of_the_dead_are_removed(directory):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    AttachFile.write(WorkerInfo("ps", 0), ADDRESSES, None, RpcOptions(), 1.0)
    (path,) = directory.glob("*.worker.json")
    path.write_text(path.read_text().replace(f'"pid":{os.getpid()}', f'"pid":{dead.pid}'))
    assert attachable() == []
    assert not path.exists()


def test_the_files_of_the_dead_are_removed_by_the_next_worker(directory):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    there = directory / "there.sock"
    there.touch()
    AttachFile.write(WorkerInfo("gone", 0), (f"unix://{directory}/gone.sock",), None, RpcOptions(), 1.0)
    AttachFile.write(WorkerInfo("elsewhere", 1), (f"unix://{there}",), None, RpcOptions(), 1.0)
    for path in directory.glob("*.worker.json"):
        path.write_text(path.read_text().replace(f'"pid":{os.getpid()}', f'"pid":{dead.pid}'))
    AttachFile.write(WorkerInfo("new", 2), ADDRESSES, None, RpcOptions(), 2.0)
    left = [path.read_text() for path in directory.glob("*.worker.json")]
    assert len(left) == 2
    assert not any('"gone"' in text for text in left)


def test_a_file_that_is_no_such_file_is_passed_over(directory):
    AttachFile.write(WorkerInfo("ps", 0), ADDRESSES, None, RpcOptions(), 1.0)
    (directory / "1-x.worker.json").write_text("{")
    assert [one.name for one in attachable()] == ["ps"]
