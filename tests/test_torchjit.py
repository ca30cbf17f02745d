"""A torch without TorchScript: all but TorchScript works, and that is refused with a clear message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from arpc import torchjit

ROOT = Path(__file__).resolve().parent.parent

HIDING = """
import importlib.abc, sys, warnings
import torch, torch.export, torch.fx, torch.nn.parallel, torch.profiler, torch.utils.data
with warnings.catch_warnings(action="ignore"):
    import torch.distributed.optim  # compiles with TorchScript while it is imported: a torch without it would not

assert "arpc" not in sys.modules


class NoTorchScript(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[:2] == ["torch", "jit"]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


for name in [name for name in sys.modules if name.split(".")[:2] == ["torch", "jit"]]:
    del sys.modules[name]
sys.meta_path.insert(0, NoTorchScript())
del torch.jit
for name in ("ScriptFunction", "ScriptMethod", "ScriptModule", "CompilationUnit", "import_ir_module_from_buffer"):
    delattr(torch._C, name)
"""

USING = """
import asyncio
import arpc._public, arpc
from arpc import torchjit
from arpc.testing import cluster
from arpc.torchscript.references import load_module

assert not torchjit.IS_AVAILABLE


async def double(x):
    return x * 2


def messages(*calls):
    for call in calls:
        try:
            call()
        except arpc.UnsupportedError as error:
            yield str(error)


async def main():
    async with cluster(2):
        x = torch.ones(3, requires_grad=True)
        assert torch.equal(await arpc.rpc_sync("worker1", torch.add, args=(x, 1)), x + 1)
        assert torch.equal(await arpc.rpc_sync("worker1", torch.ops.aten.add, args=(x, 1)), x + 1)
        assert torch.equal(await arpc.remote("worker1", double, args=(x,)), x * 2)
        module = arpc.remote("worker1", torch.nn.Linear, args=(3, 2))
        assert (await module.rpc_sync().forward(x)).shape == (2,)
        async with arpc.autograd.context() as context_id:
            loss = (await arpc.rpc_sync("worker1", double, args=(x,))).sum()
            await arpc.autograd.backward(context_id, [loss])
            assert torch.equal(arpc.autograd.get_gradients(context_id)[x], torch.full((3,), 2.0))
        refused = list(messages(lambda: load_module(b""), lambda: arpc.torchscript.parse_type("int")))
        assert refused == [
            f"torch {torch.__version__} has no TorchScript (torch.jit): use plain functions and modules, programs of "
            "torch.export or functions of torch.compile"
        ] * 2, refused


arpc.run(main)

import arpc.compat.rpc as rpc
import arpc.compat.modules
arpc.compat.modules.install()
import torch.distributed.rpc
assert torch.distributed.rpc is rpc
options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{sys.argv[1]}")
rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
assert torch.equal(rpc.rpc_sync("alone", torch.add, args=(torch.ones(2), 1)), torch.full((2,), 2.0))
rpc.shutdown()
print("all is well")
"""


def test_a_torch_without_torchscript(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(HIDING + USING)
    command = [sys.executable, "-W", "error", str(script), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all is well\n"


@pytest.mark.skipif(not torchjit.IS_AVAILABLE, reason="this torch has no TorchScript")
def test_a_torch_with_torchscript() -> None:
    torchjit.require()
    assert torchjit.ScriptFunction is torch.jit.ScriptFunction
    assert torchjit.ScriptModule is torch.jit.ScriptModule
    assert torchjit.ScriptException is torch.jit.Error
    assert torchjit.find_builtin(torch.add) == "aten::add"
    assert torchjit.find_builtin(print) is None
