"""docs/reference.md has every public name, and docs/environment.md every variable that the code knows."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Final

import pytest

import arpc

ROOT: Final = Path(__file__).resolve().parent.parent
REFERENCE: Final = (ROOT / "docs" / "reference.md").read_text()
ENVIRONMENT: Final = (ROOT / "docs" / "environment.md").read_text()
MODULES: Final = [
    "autograd",
    "functions",
    "futures",
    "launch",
    "nn",
    "optim",
    "profiler",
    "testing",
    "torchscript",
]
ROW: Final = re.compile(r"^\| `([\w.]+)` \| (.*?) \|", re.MULTILINE)
PREFIXES: Final = ("ARPC_", "SLURM_", "TORCHELASTIC_", "MASTER_", "LOCAL_", "GROUP_")
OTHERS: Final = {"RANK", "WORLD_SIZE", "USE_LIBUV", "XDG_RUNTIME_DIR", "NO_COLOR", "TERM", "OMP_NUM_THREADS"}


def public_names() -> set[str]:
    own = {f"arpc.{name}" for name in arpc.__all__ if name not in {*MODULES, "__version__"}}
    own -= {f"arpc.{name}" for name in importlib.import_module("arpc.errors").__all__}
    return own | {f"arpc.{name}.{one}" for name in MODULES for one in importlib.import_module(f"arpc.{name}").__all__}


def found(name: str) -> object:
    module, _, attribute = f"arpc.{name}".rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_every_public_name_has_an_entry():
    entries = re.findall(r"^::: ([\w.]+)$", REFERENCE, re.MULTILINE)
    assert len(entries) == len(set(entries))
    assert set(entries) == {*public_names(), "arpc.errors"}


def test_every_public_function_is_in_a_table():
    functions = {name for name in public_names() if inspect.isroutine(found(name.removeprefix("arpc.")))}
    assert functions <= {f"arpc.{name}" for name, _ in ROW.findall(REFERENCE)}


@pytest.mark.parametrize(("name", "told"), ROW.findall(REFERENCE))
def test_a_table_has_the_parameters_of_the_function(name, told):
    parameters = list(inspect.signature(found(name)).parameters)
    assert [word for word in re.findall(r"`(\w+)`", told) if word in parameters] == parameters


def test_the_errors_of_the_tables_are_exported():
    errors = set(importlib.import_module("arpc.errors").__all__)
    raised = [cells.rpartition("|")[2] for cells in re.findall(r"^\| `[\w.]+` (.*) \|$", REFERENCE, re.MULTILINE)]
    named = {name for cell in raised for name in re.findall(r"`(\w+)`", cell) if name.endswith("Error")}
    assert len(raised) == len(ROW.findall(REFERENCE))
    assert named - errors == {"TypeError"}
    assert named - {"TypeError"} <= set(arpc.__all__)


def test_every_public_name_has_a_docstring():
    undocumented = {name for name in public_names() if not inspect.getdoc(found(name.removeprefix("arpc.")))}
    assert undocumented == set()


def variables_in_the_code() -> set[str]:
    names = set()
    for path in (ROOT / "arpc").rglob("*.py"):
        if "bench" not in path.parts:
            names |= {
                node.value
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
    return {
        name
        for name in names
        if re.fullmatch(r"[A-Z][A-Z0-9_]+", name) and (name.startswith(PREFIXES) or name in OTHERS) and name[-1] != "_"
    }


def test_every_variable_is_in_the_table():
    assert variables_in_the_code() - set(re.findall(r"`([A-Z][A-Z0-9_]+)`", ENVIRONMENT)) == set()


def test_the_table_has_no_variable_that_nobody_reads():
    text = "\n".join(path.read_text() for path in (ROOT / "arpc").rglob("*.py"))
    listed = re.findall(r"`([A-Z][A-Z0-9_]+)`", ENVIRONMENT)
    assert listed
    assert [name for name in listed if name not in text] == []
