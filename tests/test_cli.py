from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

import arpc
from arpc import cli
from arpc.commands import top
from arpc.console.tables import VIEWS
from arpc.extras import install_command


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"arpc {arpc.__version__}\n"


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "arpc", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"arpc {arpc.__version__}\n"


def test_without_a_command_it_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("usage: arpc")
    assert all(command.about.split(",")[0] in " ".join(printed.out.split()) for command in cli.COMMANDS)
    assert not printed.err


def test_an_unknown_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["no-such-command"])
    assert stopped.value.code == 2
    assert "usage: arpc" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--version"],
        ["--help"],
        ["no-such-command"],
        ["--print-completion", "bash"],
        *([command.name, "--help"] for command in cli.COMMANDS),
    ],
    ids=" ".join,
)
def test_what_runs_nothing_imports_nothing_slow(arguments: list[str]) -> None:
    program = f"""
import atexit, json, runpy, sys
slow = {{"torch", "numpy", "asyncio", "msgspec", "aiohttp", "uvloop", "rich", "multiprocessing"}}
atexit.register(lambda: sys.stderr.write("\\n" + json.dumps(sorted(slow & sys.modules.keys()))))
sys.argv = ["arpc", *{arguments}]
runpy.run_module("arpc", run_name="__main__", alter_sys=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (
        "usage: arpc" in done.stdout + done.stderr
        or f"arpc {arpc.__version__}" in done.stdout
        or "_shtab" in done.stdout
    )
    assert json.loads(done.stderr.splitlines()[-1]) == []


def test_the_views_of_top_are_those_of_its_tables() -> None:
    assert tuple(VIEWS) == top.VIEWS


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_every_command_explains_itself(command: cli.Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([command.name, "--help"])
    assert stopped.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"usage: arpc {command.name}" in printed
    assert command.about in printed


def test_a_command_returns_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--list", "--rows", "peers/"]) == 0
    assert capsys.readouterr().out.splitlines() == ["peers/call", "peers/rate", "peers/send"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh", "fish"])
def test_shells_complete_commands_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--print-completion", shell])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert "launch" in printed
    assert "max-restarts" in printed


def test_bash_takes_its_completion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--print-completion", "bash"])
    completion = capsys.readouterr().out
    asked = 'COMP_WORDS=(arpc la); COMP_CWORD=1; COMP_LINE="arpc la"; COMP_POINT=7; _shtab_arpc; echo "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", f"{completion}\n{asked}"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["launch"]


def test_completion_says_what_it_takes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--print-completion", "bash"])
    assert stopped.value.code == 2
    assert install_command("cli") in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "arpc", "--print-completion", "fish"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == 128 + signal.SIGPIPE
