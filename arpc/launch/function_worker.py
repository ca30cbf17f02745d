"""The process of a launched function: ``python -m arpc.launch.function_worker PACKAGE RESULT``."""

from __future__ import annotations

import sys
from pathlib import Path

import cloudpickle

from arpc.launch.programs import run_packed
from arpc.runner import run

__all__ = ["main"]


def main(package: str, result: str) -> None:
    """Run the function and write its pickled result to the file ``result``, atomically."""
    returned = run_packed(Path(package).read_bytes(), run)
    unfinished = Path(f"{result}.unfinished")
    unfinished.write_bytes(cloudpickle.dumps(returned))
    unfinished.rename(result)


if __name__ == "__main__":
    main(*sys.argv[1:])
