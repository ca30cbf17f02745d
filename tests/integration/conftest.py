"""Processes for a test."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration import functions
from tests.integration.processes import Processes


@pytest.fixture
def runtime_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this test's workers have their unix sockets. Pytest's own directories have names too long for that."""
    with tempfile.TemporaryDirectory(prefix="arpc-test-", dir="/tmp") as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        yield Path(name)


@pytest.fixture
def processes(tmp_path: Path, runtime_directory: Path) -> Iterator[Processes]:
    made = Processes(tmp_path, runtime_directory)
    functions.events.clear()
    functions.happenings.clear()
    yield made
    made.close()
