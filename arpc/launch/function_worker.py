"""The process of a function that was launched: ``python -m arpc.launch.function_worker PACKAGE RESULT``."""

from __future__ import annotations

import sys
from pathlib import Path

import cloudpickle

from arpc.launch.programs import run_packed
from arpc.runner import run

__all__ = ["main"]


def main(package: str, result: str) -> None:
    """Run the function and leave what it returns, whole or not at all."""
    returned = run_packed(Path(package).read_bytes(), run)
    unfinished = Path(f"{result}.unfinished")
    unfinished.write_bytes(cloudpickle.dumps(returned))
    unfinished.rename(result)


if __name__ == "__main__":
    main(*sys.argv[1:])
