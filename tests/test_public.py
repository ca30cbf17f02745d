"""``import arpc`` offers every public name, and imports torch at the first use of one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from types import ModuleType

import pytest

import arpc
import arpc.testing
from arpc import _public


def test_every_public_name_is_declared_where_it_is_imported() -> None:
    assert set(arpc.__all__) == {"__version__", *_public.__all__}
    for name in _public.__all__:
        assert getattr(arpc, name) is getattr(_public, name)
    assert set(arpc.__all__) <= set(dir(arpc))


@pytest.mark.parametrize(
    "package",
    [arpc.autograd, arpc.launch, arpc.nn, arpc.optim, arpc.profiler, arpc.testing, arpc.torchscript],
    ids=lambda package: package.__name__,
)
def test_no_public_name_is_hidden_by_a_module_of_that_name(package: ModuleType) -> None:
    """Whether the function or the module is found would depend on what was imported last; a reference shows neither."""
    for name in package.__all__:
        assert importlib.util.find_spec(f"{package.__name__}.{name}") is None


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'arpc' has no attribute 'rpc_asynk'"):
        arpc.rpc_asynk  # noqa: B018
    with pytest.raises(ImportError, match="rpc_asynk"):
        from arpc import rpc_asynk  # noqa: F401


def imported_by(program: str) -> dict[str, bool]:
    """Which of the large imports a program has made at its end."""
    names = ["torch", "numpy", "asyncio", "arpc.runtime", "arpc.agent.agent", "arpc.optim"]
    shown = f"\nimport json, sys; print(json.dumps({{name: name in sys.modules for name in {names}}}))"
    done = subprocess.run([sys.executable, "-c", program + shown], capture_output=True, text=True, check=True)
    found: dict[str, bool] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "program",
    [
        "import arpc",
        "import arpc; arpc.__version__",
        "import arpc; hasattr(arpc, 'no_such_name')",
        "from arpc import errors; errors.ArpcError",
        "import arpc; arpc.errors.ArpcError",
    ],
)
def test_torch_is_not_imported_before_it_is_needed(program: str) -> None:
    assert not any(imported_by(program).values())


@pytest.mark.parametrize(
    "program",
    ["import arpc; arpc.rpc_async", "from arpc import Worker", "from arpc import *", "import arpc._public"],
)
def test_one_public_name_brings_all(program: str) -> None:
    assert all(imported_by(program).values())
