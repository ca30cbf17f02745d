"""The template: the process that workers are forked from. It has imported torch and arpc, and does nothing else.

A forked worker has no imports to do, shares the memory of the imported modules with the others, and has the same code
at the same addresses, which makes workers that share a CPU faster: its caches and branch predictions serve all of them.

The supervisor (`arpc.launch.supervisor`) starts this process and sends one order at a time, with the worker's stdin,
stdout and stderr and a pipe. A worker is forked twice, so that it is an orphan, which the supervisor adopts: the
supervisor then reaps it like any other worker, and needs this process only for the next one. The worker reads a byte
from the pipe before it does anything. The supervisor writes that byte once it has recorded the worker, and never if
this process died before it could report the worker.

Nothing here may start a thread, or run an operation of torch that does: a forked process has only the thread that
called fork.
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
    # -c puts the current directory first in the path: scripts do not have it, and it may hold another torch
    "import sys; sys.flags.safe_path or sys.path.pop(0); "
    "import arpc._public; from arpc.launch.template import main; main()"
)
PR_SET_PDEATHSIG: Final = 1
DESCRIPTORS: Final = 4
NOT_WANTED: Final = 127
WARNINGS_BYTES: Final = 1 << 16
"""The most bytes of the imports' stderr output, kept in a file of the supervisor, that each worker repeats."""


@dataclass(frozen=True, slots=True)
class Order:
    """The order to fork a worker."""

    command: tuple[str, ...]
    """The command line of a Python interpreter: its path, then a script or ``-m`` and a module, then arguments."""
    environment: Mapping[str, str | None]
    """The variables that differ from this process's environment; None removes one."""
    session: bool
    """Whether the worker leads a session of its own, and not just a process group."""
    supervisor: int
    """The pid of the supervisor, which adopts the worker."""


def main() -> None:
    """Serve the supervisor at the descriptor in ``sys.argv[1]``. Returns in workers, when their program has ended."""
    supervisor = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(ImportError):
        import uvloop  # noqa: F401 - optional: `arpc.run` uses it if it is installed
    if not _is_single():
        os._exit(NOT_WANTED)
    gc.collect()
    gc.freeze()  # a collection would write to every object, and so copy the memory that is to be shared
    order = _serve(supervisor)
    _run(order)


def _is_single() -> bool:
    """Whether this is the only thread, after a fork has made libraries end the threads that cannot outlive one."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return len(list(Path("/proc/self/task").iterdir())) == 1


# -- in the template ---------------------------------------------------------------------------------------------------


def _serve(supervisor: socket.socket) -> Order:
    """Fork a worker for each order. Returns in the worker only; the template exits when the supervisor is gone."""
    received = b""
    descriptors: list[int] = []
    supervisor.sendall(b'{"warm": true}\n')
    while True:
        try:
            data, more, _, _ = socket.recv_fds(supervisor, 1 << 16, DESCRIPTORS)
        except OSError:
            data, more = b"", []
        if not data:
            os._exit(0)  # nothing to clean up, and exit handlers of imported modules are for workers
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
                    supervisor.close()
                    _take_place(order, descriptors)
                    return order
                answer = {"forked": worker}
        for descriptor in descriptors:
            os.close(descriptor)
        descriptors = []
        with contextlib.suppress(OSError):  # the next read reports a closed socket
            supervisor.sendall(json.dumps(answer).encode() + b"\n")


def _first_in_path(order: Order) -> Path:
    """Return the directory where the program looks for modules first."""
    return Path.cwd() if order.command[1] == "-m" else Path(order.command[1]).resolve().parent


def hides_imported(directory: Path) -> bool:
    """Whether a program that looks here first would find another module in place of one that is already imported."""
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
    """Fork an orphan. Returns its pid, or None in the orphan; raises OSError if the fork failed."""
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        worker = -1
        try:
            worker = os.fork()
            if worker > 0:
                if lead_group:
                    os.setpgid(worker, worker)  # here, so that it is done before the supervisor gets the pid
                os.write(writer, str(worker).encode())
        finally:
            if worker != 0:
                os._exit(0)  # also after an error: the empty pipe reports it
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
    """Become the process that the supervisor would have started with the command."""
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
    if not permitted or os.getppid() != order.supervisor:  # the supervisor gave it up, or died
        os._exit(NOT_WANTED)
    with contextlib.suppress(OSError):  # Python ignores such errors of its warnings too
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
    """Open stdin, stdout and stderr as the interpreter does: the present objects are for the template's files."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before = getattr(sys, f"__{name}__")
        mode = "r" if name == "stdin" else "w"
        is_raw = before.write_through and mode == "w"
        opened: Any = open(number, f"{mode}b", 0 if is_raw else -1, closefd=False)  # noqa: SIM115 - it stays open
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
    """Make ``ps`` show the worker's command in place of the template's, as much of it as there is room for."""
    # the name, in brackets, may hold anything; the 48th and 49th fields say where the arguments are: see proc(5)
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if 0 < start < end:
        text = b"\0".join(map(os.fsencode, command))[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _forget_chance() -> None:
    """Give each worker its own random seeds and authkey. The module `random` reseeds itself after a fork."""
    torch.default_generator.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    multiprocessing.current_process().authkey = os.urandom(32)


def _run(order: Order) -> None:
    """Run the program as `__main__`, and let the interpreter end as it does after any program."""
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
    exec(compile(source, path, "exec", dont_inherit=True), vars(module))  # noqa: S102 - to run a script is its purpose


def _show_without_template(error: BaseException) -> None:
    """Make the traceback of an uncaught error begin at the program's own frames."""
    shown = error.__traceback__
    while shown is not None and shown.tb_frame.f_globals is globals():
        shown = shown.tb_next
    hook = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, _: TracebackType | None) -> None:
        sys.excepthook = hook
        hook(kind, value.with_traceback(shown), shown)

    sys.excepthook = show
