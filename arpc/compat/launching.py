"""Running a script, or a module, as the main program of a process that was started for something else."""

from __future__ import annotations

import io
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

__all__ = ["run_module", "run_script"]


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Run a file as python itself would: as ``__main__``, with its arguments, its folder first on the path.

    It stays ``__main__`` after its end, for threads and exit handlers that look names up there.
    """
    path = Path(script)
    try:
        with io.open_code(str(path.resolve())) as file:
            code = compile(file.read(), script, "exec")
    except OSError as error:
        sys.exit(f"python -m arpc.compat: can't open file {script!r}: {error.strerror}")
    sys.argv = [script, *arguments]
    sys.path[0] = str(path.resolve().parent)
    module = ModuleType("__main__")
    module.__file__ = script
    module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    module.__spec__ = None
    sys.modules["__main__"] = module
    exec(code, module.__dict__)  # noqa: S102 - to run a script is its purpose


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run a module on the drop-in, as ``python -m`` would."""
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
