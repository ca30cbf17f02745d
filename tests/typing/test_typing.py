"""The files beside this one are for mypy: `assert_type` says what it knows, `type: ignore` what it has to refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
from mypy import api

HERE = Path(__file__).parent
SNIPPETS = sorted(path.name for path in HERE.glob("*.py") if not path.name.startswith("test_"))
# Not the project's own: what is checked here does not depend on torch's types, and reading them takes most of the time
CONFIGURATION = """
[mypy]
strict = true
follow_imports = silent
explicit_package_bases = true
[mypy-torch.*]
follow_imports = skip
"""


@pytest.mark.parametrize("name", SNIPPETS)
def test_types_are_as_written(name: str, tmp_path: Path) -> None:
    configuration = tmp_path / "mypy.ini"
    configuration.write_text(CONFIGURATION)
    arguments = ["--config-file", str(configuration), "--cache-dir", str(tmp_path / "cache"), str(HERE / name)]
    report, errors, _ = api.run(arguments)
    assert report.startswith("Success"), report + errors
