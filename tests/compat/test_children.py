"""Processes that a program under ``python -m arpc.compat`` starts, in whichever way, run on arpc too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import AssertionRewriter

import arpc
from arpc.compat.__main__ import _arguments
from arpc.compat.inheritance import install_in_children

ROOT = Path(__file__).resolve().parents[2]
CHILDREN = ROOT / "arpc" / "compat" / "children"
LIMIT_S = 200

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def run(*command: str, path: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": path},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


# -- how a child begins, with modules that take the places of torch and arpc


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    (tmp_path / "torch.py").write_text("print('torch')\n")
    (tmp_path / "sitecustomize.py").write_text("print('another sitecustomize')\n")
    package = tmp_path / "arpc" / "compat"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("import torch\nprint('arpc')\n")
    (package / "__init__.py").write_text("")
    (package / "modules.py").write_text("def install():\n    print('installed')\n")
    return tmp_path


def begin(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run("-c", code, path=os.pathsep.join([str(CHILDREN), str(folder)]), cwd=folder)


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("print('nothing')", ["nothing"]),
        ("import torch; print('program')", ["torch", "arpc", "installed", "program"]),
        ("import arpc; print('program')", ["torch", "arpc", "installed", "program"]),
        (
            "import importlib.util; importlib.util.find_spec('torch'); print('looked'); import torch; print('program')",
            ["looked", "torch", "arpc", "installed", "program"],
        ),
        (
            "import torch, arpc; print(torch.__spec__.loader is torch.__loader__)",
            ["torch", "arpc", "installed", "True"],
        ),
        ("import sys; print([p for p in sys.path if p.endswith('children')])", ["[]"]),
    ],
)
def test_how_a_child_begins(stand_ins: Path, code: str, printed: list[str]) -> None:
    done = begin(code, stand_ins)
    assert done.stdout.split("\n")[:-1] == ["another sitecustomize", *printed], done.stderr
    assert not done.stderr


def test_a_child_without_arpc_says_so_and_goes_on(stand_ins: Path) -> None:
    (stand_ins / "arpc" / "compat" / "modules.py").write_text("import no_such_module\n")
    done = begin("import torch; print('program')", stand_ins)
    assert done.stdout.split() == ["another", "sitecustomize", "torch", "arpc", "program"]
    assert "torch.distributed.rpc is torch's own in this process: No module named 'no_such_module'" in done.stderr


def test_the_environment_of_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/first:/second")
    assert install_in_children()
    assert os.environ["PYTHONPATH"] == f"{CHILDREN}:/first:/second"
    assert install_in_children()
    assert os.environ["PYTHONPATH"] == f"{CHILDREN}:/first:/second"
    monkeypatch.delenv("PYTHONPATH")
    assert install_in_children()
    assert os.environ["PYTHONPATH"] == str(CHILDREN)


# -- real ones


def test_every_way_to_start_a_process(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        """
import multiprocessing
import subprocess
import sys

import torch.distributed.rpc as rpc


def tell(way):
    import torch._C._distributed_rpc as native

    print(way, rpc.__name__, native.__name__, flush=True)


if __name__ == "__main__":
    print(sys.argv[1:], flush=True)
    code = "import torch.distributed.rpc as rpc; print('subprocess', rpc.__name__, flush=True)"
    subprocess.run([sys.executable, "-c", code], check=True)
    for way in ("spawn", "forkserver"):
        context = multiprocessing.get_context(way)
        if way == "forkserver":
            context.set_forkserver_preload(["__main__", "torch"])
        process = context.Process(target=tell, args=(way,))
        process.start()
        process.join()
"""
    )
    done = run("-m", "arpc.compat", str(script), "--", "-q", path=str(ROOT))
    assert done.stdout.split("\n")[:-1] == [
        "['--', '-q']",
        "subprocess arpc.compat.rpc",
        "spawn arpc.compat.rpc arpc.compat.rpc.native",
        "forkserver arpc.compat.rpc arpc.compat.rpc.native",
    ], done.stderr
    assert done.stderr == f"arpc.compat: torch.distributed.rpc is arpc in {script} and the Python processes it starts\n"


def test_rank_0_returns_first(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        """
import os
import sys

import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

is_ready = []


def ask():
    return bool(is_ready)


def main(rank, folder):
    for number in range(10):
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/group{number}")
        rpc.init_rpc(f"worker{2 - rank}", rank=rank, world_size=3, rpc_backend_options=options)
        is_ready.append(rank)
        if rank:
            os.write(1, f"{rpc.rpc_sync('worker2', ask)}\\n".encode())  # at once: two processes write
        rpc.shutdown()
        is_ready.clear()


if __name__ == "__main__":
    mp.spawn(main, (sys.argv[1],), nprocs=3)
"""
    )
    done = run("-m", "arpc.compat", "-q", str(script), str(tmp_path), path=str(ROOT))
    assert done.stdout.split() == ["True"] * 20, done.stderr


# -- the command


@pytest.mark.parametrize(
    ("given", "script", "args", "is_module"),
    [
        (["a.py"], "a.py", [], False),
        (["-q", "a.py", "-q", "--", "-m"], "a.py", ["-q", "--", "-m"], False),
        (["a.py", "--", "x"], "a.py", ["--", "x"], False),
        (["-m", "pytest", "-W", "error"], "pytest", ["-W", "error"], True),
        (["-qm", "pytest", "-q"], "pytest", ["-q"], True),
        (["--", "a.py", "b"], "a.py", ["b"], False),
    ],
)
def test_arguments(given: list[str], script: str, args: list[str], is_module: bool) -> None:
    chosen, handed_on = _arguments(given)
    assert (chosen.script, handed_on, chosen.is_module) == (script, args, is_module)


def test_without_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _arguments(["-q"])
    assert "script" in capsys.readouterr().err


def test_pytest_may_find_arpc_imported() -> None:
    assert AssertionRewriter.is_rewrite_disabled(arpc.__doc__ or "")
