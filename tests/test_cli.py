from __future__ import annotations

import subprocess
import sys

import pytest

import arpc
from arpc import cli
from arpc.extras import install_command


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"arpc {arpc.__version__}\n"


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "arpc", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"arpc {arpc.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["no-such-command"]])
def test_without_a_command_it_says_which_there_are(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "usage: arpc" in capsys.readouterr().err


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


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
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
