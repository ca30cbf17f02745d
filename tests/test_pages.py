"""What stands on the pages in docs/ works: programs print what follows them, and parts of programs name what exists."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
BLOCK: Final = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES: Final = sorted((ROOT / "docs").glob("*.md"))
PROGRAM: Final = re.compile(r"^```python\n((?:(?!^```).)*)^```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# torch deprecates TorchScript, which the pages speak of: from torch 2.15 on by a FutureWarning
TORCHSCRIPT: Final = ("`torch.jit.script` is deprecated", "`torch.jit.script` is not supported in Python")
WARNINGS: Final = ",".join(["error", *(f"ignore:{text}" for text in TORCHSCRIPT)])
PROGRAMS: Final = [
    pytest.param(*match, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, match in enumerate(PROGRAM.findall(page.read_text()))
]


@pytest.mark.timeout(120)  # some start processes, each of which imports torch
@pytest.mark.parametrize(("program", "output"), PROGRAMS)
def test_it_prints_what_is_shown(program, output, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(program)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": WARNINGS, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == (output, "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_parses_and_names_what_exists(page):
    for block in BLOCK.findall(page.read_text()):
        tree = compile(block, page.name, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and (name := dotted(node)).startswith("arpc."):
                assert exists(name), f"{page.name} speaks of {name}"


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def exists(name: str) -> bool:
    """Whether a name of arpc leads somewhere, by attributes or by modules that nobody has imported yet."""
    parts = name.split(".")
    found = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(parts[:number]))
            except ImportError:
                return False
        found = getattr(found, part)
    return True
