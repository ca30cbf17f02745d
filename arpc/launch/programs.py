"""The program of the workers: a script, a module, or a function; and the command line that runs it."""

from __future__ import annotations

import multiprocessing.spawn
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import cloudpickle

from arpc.errors import ConfigurationError, LaunchError, SerializationError

__all__ = [
    "Function",
    "Module",
    "Program",
    "command_for",
    "extend_path",
    "pack_function",
    "result_of",
    "run_packed",
    "words",
]

FUNCTION_WORKER: Final = "arpc.launch.function_worker"


@dataclass(frozen=True, slots=True)
class Module:
    """A module to run as ``python -m`` would."""

    name: str


Function: TypeAlias = Callable[..., Any]
Program: TypeAlias = str | os.PathLike[str] | Module | Function


def command_for(program: Program, args: Sequence[object], directory: Path) -> Callable[[int], list[str]]:
    """Return a function from rank to command line. A function to run is pickled into the directory."""
    if isinstance(program, str | os.PathLike):
        path = Path(program)
        if not path.is_file():
            raise ConfigurationError(f"there is no script {str(path)!r} to launch; a module goes with -m")
        command = [sys.executable, str(path), *words(args)]
        return lambda _rank: command
    if isinstance(program, Module):
        command = [sys.executable, "-m", program.name, *words(args)]
        return lambda _rank: command
    if not callable(program):
        raise ConfigurationError(f"a script, a launch.Module or a function can be launched, not {program!r}")
    package = directory / "function"
    package.write_bytes(pack_function(program, args))
    return lambda rank: [
        sys.executable,
        "-m",
        FUNCTION_WORKER,
        str(package),
        str(_result_file(directory, rank)),
    ]


def words(args: Sequence[object]) -> list[str]:
    """Return the arguments of a script; raise `ConfigurationError` if one is not a string."""
    for word in args:
        if not isinstance(word, str):
            raise ConfigurationError(f"the arguments of a script are strings, not {type(word).__name__}: {word!r}")
    return [str(word) for word in args]


def pack_function(function: Function, args: Sequence[object]) -> bytes:
    """Pickle a function and its arguments for another process.

    Functions of a script go by reference, and the worker imports the script as `multiprocessing` does: its globals are
    then the worker's own, and functions that workers call on each other mean the same everywhere. A function without an
    importable name (a lambda, a cell of a notebook) goes by value. Raises `SerializationError` if neither is possible.
    """
    # lets the worker find its parent's modules, as spawned processes do; the key is for multiprocessing itself
    preparation: dict[str, Any] = multiprocessing.spawn.get_preparation_data("arpc")
    preparation.pop("authkey", None)
    has_script = "init_main_from_path" in preparation or "init_main_from_name" in preparation
    try:
        if has_script or getattr(function, "__module__", None) != "__main__":
            return pickle.dumps((preparation, pickle.dumps((function, tuple(args)))))
    except (pickle.PicklingError, AttributeError, TypeError):
        pass  # by value, then
    try:
        return pickle.dumps((preparation, cloudpickle.dumps((function, tuple(args)))))
    except Exception as error:
        raise SerializationError(f"{function!r} cannot be sent to the workers: {error}") from error


def run_packed(package: bytes, run: Callable[[Any], Any]) -> Any:
    """Unpack and call a function that `pack_function` packed; ``run`` runs the coroutine of an async function."""
    preparation, inner = pickle.loads(package)
    multiprocessing.spawn.prepare(preparation)
    function, args = pickle.loads(inner)
    result = function(*args)
    return run(result) if hasattr(result, "__await__") else result


def _result_file(directory: Path, rank: int) -> Path:
    return directory / f"result-{rank}"


def result_of(directory: Path, rank: int, name: str) -> Any:
    """Return the function's result on a worker; raise `LaunchError` if it cannot be read."""
    try:
        return pickle.loads(_result_file(directory, rank).read_bytes())
    except Exception as error:
        raise LaunchError(f"what worker {name!r} returned cannot be read: {error}", name, 0) from error


def extend_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the PYTHONPATH with which workers find this arpc, if it is not installed but next to the running program.

    Workers run another program, and so have another first directory in their path.
    """
    root = Path(__file__).resolve().parents[2]
    if not sys.path or Path(sys.path[0]).resolve() != root:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), str(root))))}
