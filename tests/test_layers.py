"""Imports go downwards: every module of arpc has a layer, and imports only the layers below and its own package.

The rules, each shown below by a source that breaks it:

- A module in no layer is an error: say where it belongs.
- An import under ``if TYPE_CHECKING:`` counts like any other: a type that a lower layer needs belongs to a lower layer.
- An import of arpc inside a function hides a cycle, so its line says in a comment that it is optional or slow.
- The wire is bytes in, messages out: nothing there knows loops, sockets or threads.
- ``arpc.testing`` is for tests alone.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent

# The layer's number, and its modules or packages. Where a layer has several rows, each may import the rows above it.
LAYERS: Final = (
    (0, {"errors", "extras", "private"}),
    (0, {"_version", "devices", "garbage", "ids", "log", "tls", "torchjit", "torchstate", "user_errors"}),
    (0, {"options"}),
    (1, {"wire"}),
    (2, {"transport"}),
    (3, {"group"}),
    (3, {"agent"}),
    (4, {"autograd", "profiler", "rref", "torchscript"}),
    (4, {"metrics"}),  # looks at the features above
    (5, {"http"}),
    (5, {"callee"}),  # what `Worker.on` returns
    (5, {"runtime"}),
    (5, {"startup"}),
    (6, {"functions", "futures", "runner"}),
    (6, {"api", "batching"}),
    (6, {"optim"}),
    (6, {"nn"}),
    (6, {"launch"}),
    (6, {"_public"}),  # imports what is above
    (6, {"__init__"}),  # offers those names; the rows below are users of `import arpc`
    (6, {"compat"}),
    (6, {"bench", "certs", "console", "testing"}),
    (6, {"commands"}),
    (6, {"cli"}),
    (6, {"__main__"}),
)
ROW: Final = {name: row for row, (_, names) in enumerate(LAYERS) for name in names}
NUMBER: Final = {name: number for number, names in LAYERS for name in names}

# (importer, imported): gradients flow through remote references, so their recording knows both.
SIDEWAYS: Final = {("autograd", "rref")}

NOT_ON_THE_WIRE: Final = {
    "_thread",
    "asyncio",
    "concurrent",
    "multiprocessing",
    "select",
    "selectors",
    "socket",
    "socketserver",
    "ssl",
    "threading",
    "uvloop",
}

EXCUSE: Final = re.compile(r"\b(optional|slow)\b", re.IGNORECASE)


class Import(NamedTuple):
    target: str  # the dotted name, absolute; `from a import b` is a.b
    line: int
    hidden: bool  # inside a function
    excused: bool  # with a comment that says why it waits


class ImportFinder(ast.NodeVisitor):
    """Collects every import of one module, wherever it stands."""

    def __init__(self, module: str, source: str, *, is_package: bool) -> None:
        self.found: list[Import] = []
        self._package = module if is_package else module.rpartition(".")[0]
        self._depth = 0
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        self._excused_lines = {t.start[0] for t in tokens if t.type == tokenize.COMMENT and EXCUSE.search(t.string)}
        self.visit(ast.parse(source))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815
    visit_Lambda = visit_FunctionDef  # noqa: N815

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            parents = self._package.split(".")
            base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
        for alias in node.names:
            self._add(f"{base}.{alias.name}", node)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        name = node.args[0] if node.args else None
        if called in {"import_module", "__import__"} and isinstance(name, ast.Constant) and isinstance(name.value, str):
            self._add(name.value, node)
        self.generic_visit(node)

    def _add(self, target: str, node: ast.stmt | ast.expr) -> None:
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        excused = not self._excused_lines.isdisjoint(lines)
        self.found.append(Import(target, node.lineno, self._depth > 0, excused))


def unit_of(module: str) -> str | None:
    """The entry of LAYERS that a dotted name of arpc belongs to; None if it is not arpc's."""
    root, _, rest = module.partition(".")
    if root != "arpc":
        return None
    name = rest.partition(".")[0]
    return name if name in ROW else "__init__"  # any other name of arpc is one that arpc/__init__.py offers


def complaints(module: str, source: str, *, is_package: bool = False) -> Iterator[str]:
    """What is wrong with the imports of one module of arpc."""
    own = "__init__" if module == "arpc" else module.split(".")[1]
    if own not in ROW:
        yield f"{module} is in no layer: add {own!r} to LAYERS"
        return
    for found in ImportFinder(module, source, is_package=is_package).found:
        where = f"{module}:{found.line}"
        if own == "wire" and found.target.partition(".")[0] in NOT_ON_THE_WIRE:
            yield f"{where} imports {found.target}: the wire knows no loops, sockets or threads"
        unit = unit_of(found.target)
        if unit is None:
            continue
        if found.hidden and not found.excused:
            yield f"{where} hides the import of {found.target} in a function: say there that it is optional or slow"
        if unit == own:
            continue
        if unit == "testing":
            yield f"{where} imports {found.target}: arpc.testing is for tests alone"
        elif ROW[unit] >= ROW[own] and (own, unit) not in SIDEWAYS:
            direction = f"{own} (layer {NUMBER[own]}) may not use {unit} (layer {NUMBER[unit]})"
            yield f"{where} imports {found.target}: {direction}"


def test_imports_of_arpc_go_downwards() -> None:
    files = sorted((ROOT / "arpc").rglob("*.py"))
    assert files, "arpc is not where this test looks for it"
    found: list[str] = []
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        found += complaints(module, file.read_text(encoding="utf-8"), is_package=is_package)
    assert not found, "\n" + "\n".join(found)


def test_a_module_is_in_one_layer_only() -> None:
    assert sum(len(names) for _, names in LAYERS) == len(ROW)
    assert [number for number, _ in LAYERS] == sorted(number for number, _ in LAYERS)


UPWARDS = "may not use"
HIDDEN = "hides the import"
IMPURE = "knows no loops"
FOR_TESTS = "for tests alone"


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        pytest.param("arpc.stray", "", "in no layer", id="module-in-no-layer"),
        pytest.param("arpc.stray.inner", "", "in no layer", id="package-in-no-layer"),
        pytest.param("arpc.errors", "import arpc.ids", UPWARDS, id="row-above-imports-row-below"),
        pytest.param("arpc.ids", "from arpc import options", UPWARDS, id="same-row"),
        pytest.param("arpc.wire.frames", "from arpc.agent.client.pending_calls import Calls", UPWARDS, id="upwards"),
        pytest.param("arpc.wire.frames", "from ..agent import calls", UPWARDS, id="upwards-relative"),
        pytest.param("arpc.wire.frames", "from .. import agent", UPWARDS, id="upwards-relative-package"),
        pytest.param("arpc.agent.agent", "import arpc", UPWARDS, id="whole-package"),
        pytest.param("arpc.agent.agent", "from arpc import rpc_async", UPWARDS, id="public-name"),
        pytest.param("arpc.agent.agent", "from arpc import *", UPWARDS, id="star"),
        pytest.param("arpc.rref.handle", "import arpc.autograd.contexts", UPWARDS, id="exception-has-one-direction"),
        pytest.param("arpc.profiler", "import arpc.rref.handle", UPWARDS, id="exception-is-for-one"),
        pytest.param("arpc.api", "if TYPE_CHECKING:\n import arpc.cli", UPWARDS, id="type-checking"),
        pytest.param("arpc.api", "try:\n import arpc.console\nexcept ImportError: pass", UPWARDS, id="in-try"),
        pytest.param("arpc.api", "class A:\n import arpc.cli", UPWARDS, id="in-class"),
        pytest.param("arpc.api", "importlib.import_module('arpc.cli')", UPWARDS, id="import-module"),
        pytest.param("arpc.api", "def f():\n import arpc.cli  # slow", UPWARDS, id="excuse-is-for-hiding-only"),
        pytest.param("arpc.api", "def f():\n import arpc.runtime", HIDDEN, id="in-function"),
        pytest.param("arpc.api", "async def f():\n from arpc.errors import E", HIDDEN, id="in-coroutine"),
        pytest.param("arpc.api", "class A:\n def f(self):\n  import arpc.ids  # noqa", HIDDEN, id="other-comment"),
        pytest.param("arpc.api", "def f():\n # slow\n import arpc.ids", HIDDEN, id="comment-on-another-line"),
        pytest.param("arpc.api", "def f():\n x = '# slow'; import arpc.ids", HIDDEN, id="string-is-no-comment"),
        pytest.param("arpc.api", "f = lambda: __import__('arpc.ids')", HIDDEN, id="in-lambda"),
        pytest.param("arpc.rref.handle", "def f():\n from .context import C", HIDDEN, id="own-package-in-function"),
        pytest.param("arpc.wire.protocol", "import asyncio", IMPURE, id="wire-loop"),
        pytest.param("arpc.wire.protocol", "from asyncio.events import Handle", IMPURE, id="wire-loop-inner"),
        pytest.param("arpc.wire.protocol", "def f():\n import socket  # slow", IMPURE, id="wire-socket-in-function"),
        pytest.param("arpc.wire.protocol", "from threading import Lock", IMPURE, id="wire-thread"),
        pytest.param("arpc.wire", "import ssl as tls", IMPURE, id="wire-tls"),
        pytest.param("arpc.cli", "from arpc.testing import cluster", FOR_TESTS, id="testing-from-above"),
        pytest.param("arpc.agent.peers", "import arpc.testing.faulty", FOR_TESTS, id="testing-from-below"),
    ],
)
def test_the_checker_complains_about(module: str, source: str, complaint: str) -> None:
    found = list(complaints(module, source, is_package=module == "arpc.wire"))
    assert len(found) == 1, found
    assert complaint in found[0]
    assert found[0].startswith(module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        pytest.param("arpc.ids", "from arpc.errors import ConfigurationError", id="row-below-imports-row-above"),
        pytest.param("arpc.agent.agent", "import arpc.wire.frames, arpc.transport.connection", id="downwards"),
        pytest.param("arpc.agent.agent", "from arpc import errors, ids", id="downwards-from-root"),
        pytest.param("arpc.agent.agent", "from ..wire import frames\nfrom ..errors import E", id="downwards-relative"),
        pytest.param("arpc.agent.agent", "from . import calls\nfrom .peers import Peers", id="own-package"),
        pytest.param(
            "arpc.agent.client.pending_calls", "if TYPE_CHECKING:\n from .agent import Agent", id="own-package-types"
        ),
        pytest.param("arpc.agent.agent", "import asyncio, socket, threading, ssl", id="loops-above-the-wire"),
        pytest.param("arpc.wire.frames", "import arpcx, struct\nfrom asyncio_like import x", id="like-names"),
        pytest.param("arpc.autograd.engine", "from arpc.rref.handle import RRef", id="autograd-uses-rref"),
        pytest.param("arpc.api", "def f():\n import arpc.runtime  # slow: imports torch.fx", id="excused-as-slow"),
        pytest.param("arpc.cli", "def f():\n from arpc.http import (  # Optional extra\n  a,\n )", id="excused-lines"),
        pytest.param("arpc.cli", "def f():\n import rich", id="hidden-but-not-arpc"),
        pytest.param(
            "arpc.testing.in_process_cluster", "import arpc\nfrom arpc.testing import faulty", id="testing-uses-arpc"
        ),
        pytest.param("arpc", "from arpc.api import rpc_async\nfrom .nn import RemoteModule", id="public-names"),
        pytest.param("arpc.__main__", "from arpc.cli import main", id="main"),
    ],
)
def test_the_checker_accepts(module: str, source: str) -> None:
    assert list(complaints(module, source, is_package=module == "arpc")) == []
