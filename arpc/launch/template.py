"""The process that workers are forked from: it has imported torch and arpc, and does nothing else.

A worker made so has no import to do, shares the memory of what is imported with the others, and has the same code at
the same addresses, which makes workers that share a CPU faster: what the CPU has learned about one holds for all.

It is started by the keeper (`arpc.launch.keeper`), which sends one order at a time, with the worker's stdin, stdout and
stderr and a pipe. A worker is forked twice, so that it is an orphan and the keeper, which adopts those, its parent: the
keeper hears of its end as of any other, and needs this process for nothing but the next one. The worker reads a byte
from the pipe before it does anything: it is given once the keeper knows the worker, and never if this process died
before it could tell.

Nothing here may start a thread, or run an operation of torch that does: a fork has the thread that called it, alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import multiprocessing
import os
import signal
import socket
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final

import torch

from arpc.private.interpreter import run_module_as_main

__all__ = ["BOOT", "main"]

BOOT: Final = (
    # what -c puts first in the path is no part of a script's, and may hold another torch
    "import sys; sys.flags.safe_path or sys.path.pop(0); "
    "import arpc._public; from arpc.launch.template import main; main()"
)
PR_SET_PDEATHSIG: Final = 1
DESCRIPTORS: Final = 4
NOT_WANTED: Final = 127
WARNINGS_BYTES: Final = 1 << 16
"""How much of what was said while importing, to a file of the keeper's, each worker says again."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker is to be."""

    command: tuple[str, ...]
    """As for an interpreter of its own: its path, then a script or ``-m`` and a module, then arguments."""
    environment: Mapping[str, str | None]
    """Where it differs from this process's."""
    session: bool
    """It leads a session of its own, and not just a process group."""
    keeper: int
    """The process that adopts it."""


def main() -> None:
    """Serve the keeper at the descriptor in ``sys.argv[1]``. This returns in workers, when their program has ended."""
    keeper = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(ImportError):
        import uvloop  # noqa: F401 - optional: what `arpc.run` takes if it is there
    if not _is_single():
        os._exit(NOT_WANTED)
    gc.collect()
    gc.freeze()  # a collection would write to every object, and so copy the memory that is to be shared
    order = _serve(keeper)
    _run(order)


def _is_single() -> bool:
    """Whether this is the only thread, once libraries whose own threads do not outlive a fork have ended them."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return len(list(Path("/proc/self/task").iterdir())) == 1


# -- in the template ---------------------------------------------------------------------------------------------------


def _serve(keeper: socket.socket) -> Order:
    """Fork a worker for each order. Returns in the worker; ends the process when there will be no more orders."""
    received = b""
    descriptors: list[int] = []
    keeper.sendall(b'{"warm": true}\n')
    while True:
        try:
            data, more, _, _ = socket.recv_fds(keeper, 1 << 16, DESCRIPTORS)
        except OSError:
            data, more = b"", []
        if not data:
            os._exit(0)  # there is nothing to tidy up, and handlers of what was imported are the workers' to run
        received += data
        descriptors += more
        if not received.endswith(b"\n"):
            continue
        asked = json.loads(received)
        received = b""
        order = Order(**asked | {"command": tuple(asked["command"])})
        if hides_imported(_first_in_path(order)):
            answer: dict[str, object] = {"refused": "where it looks for modules first are others than those imported"}
        else:
            try:
                worker = _fork(lead_group=not order.session)
            except OSError as error:
                answer = {"refused": str(error)}
            else:
                if worker is None:
                    keeper.close()
                    _take_place(order, descriptors)
                    return order
                answer = {"forked": worker}
        for descriptor in descriptors:
            os.close(descriptor)
        descriptors = []
        with contextlib.suppress(OSError):  # reading will tell as well
            keeper.sendall(json.dumps(answer).encode() + b"\n")


def _first_in_path(order: Order) -> Path:
    """Where the program will look for modules before anywhere else."""
    return Path.cwd() if order.command[1] == "-m" else Path(order.command[1]).resolve().parent


def hides_imported(directory: Path) -> bool:
    """Whether a program that looks there first would find another module than one that is imported already."""
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            module = sys.modules.get(path.name.partition(".")[0])
            if module is not None and path.name != "__main__.py" and _is_module(path):
                found = Path(getattr(module, "__file__", None) or "/").resolve()
                if not found.is_relative_to(directory):
                    return True
    return False


def _is_module(path: Path) -> bool:
    return path.suffix in {".py", ".pyc", ".so"} or (path / "__init__.py").exists()


def _fork(*, lead_group: bool) -> int | None:
    """Fork an orphan. Returns its process id, or None in itself."""
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        worker = -1
        try:
            worker = os.fork()
            if worker > 0:
                if lead_group:
                    os.setpgid(worker, worker)  # here, so that it is done when the keeper hears of it
                os.write(writer, str(worker).encode())
        finally:
            if worker != 0:
                os._exit(0)  # whatever happened: that the pipe is empty tells
        os.close(reader)
        os.close(writer)
        return None
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    os.waitpid(middle, 0)
    if not said:
        raise OSError("the worker could not be forked")
    return int(said)


# -- in the worker -----------------------------------------------------------------------------------------------------


def _take_place(order: Order, descriptors: list[int]) -> None:
    """Become the process that the keeper would have started with the command."""
    if order.session:
        os.setsid()
    permission = descriptors.pop()
    warnings = os.pread(2, WARNINGS_BYTES, 0)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    permitted = os.read(permission, 1)
    os.close(permission)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if not permitted or os.getppid() != order.keeper:  # it died before it could take this one along
        os._exit(NOT_WANTED)
    with contextlib.suppress(OSError):  # as where Python writes its warnings
        os.write(2, warnings)
    for name, value in order.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _open_streams()
    _forget_chance()
    sys.orig_argv[:] = order.command
    _show_command(order.command)


def _open_streams() -> None:
    """Make stdin, stdout and stderr as the interpreter does: that they are no terminals was true of others."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before = getattr(sys, f"__{name}__")
        mode = "r" if name == "stdin" else "w"
        is_raw = before.write_through and mode == "w"
        opened: Any = open(number, f"{mode}b", 0 if is_raw else -1, closefd=False)  # noqa: SIM115 - to stay
        (opened if is_raw else opened.raw).name = f"<{name}>"
        stream = io.TextIOWrapper(
            opened,
            encoding=before.encoding,
            errors=before.errors,
            newline="\n",
            line_buffering=not before.write_through and (name == "stderr" or opened.isatty()),
            write_through=before.write_through,
        )
        stream.mode = mode  # type: ignore[misc]  # as the interpreter does
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _show_command(command: tuple[str, ...]) -> None:
    """Have ``ps`` show the command of the worker, where that of the template was: as much of it as there is room."""
    # the name, in brackets, may hold anything; the 48th and 49th fields say where the arguments are: see proc(5)
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if 0 < start < end:
        text = b"\0".join(map(os.fsencode, command))[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _forget_chance() -> None:
    """What is random in a process is not to be the same in all. The module `random` sees to itself."""
    torch.default_generator.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    multiprocessing.current_process().authkey = os.urandom(32)


def _run(order: Order) -> None:
    """Run the program as `__main__`, and let the interpreter end as it does after any."""
    here = sys.modules["__main__"]
    module = types.ModuleType("__main__")
    vars(module).update({name: value for name, value in vars(here).items() if name.startswith("__")})
    sys.modules["__main__"] = module
    if "__mp_main__" in sys.modules:
        sys.modules["__mp_main__"] = module
    importlib.invalidate_caches()
    try:
        if order.command[1] == "-m":
            _run_module(order.command[2], order.command[3:])
        else:
            _run_script(order.command[1], order.command[2:], module)
    except SystemExit:
        raise
    except BaseException as error:
        _show_without_template(error)
        raise


def _run_module(name: str, arguments: tuple[str, ...]) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path.cwd()))
    sys.argv[:] = ["-m", *arguments]
    run_module_as_main(name)


def _run_script(name: str, arguments: tuple[str, ...], module: ModuleType) -> None:
    path = str(Path(name).absolute())
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path(name).resolve().parent))
    sys.argv[:] = [name, *arguments]
    vars(module).update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    source = Path(path).read_bytes()
    exec(compile(source, path, "exec", dont_inherit=True), vars(module))  # noqa: S102 - it is what a script is for


def _show_without_template(error: BaseException) -> None:
    """Have the traceback of an uncaught error begin where the program does."""
    shown = error.__traceback__
    while shown is not None and shown.tb_frame.f_globals is globals():
        shown = shown.tb_next
    hook = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, _: TracebackType | None) -> None:
        sys.excepthook = hook
        hook(kind, value.with_traceback(shown), shown)

    sys.excepthook = show
