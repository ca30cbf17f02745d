"""The process that keeps the workers of one launch: their parent, so that none of them is ever left behind.

It is run as a script by `arpc.launch.keeping`, imports the standard library only and so is up within milliseconds. It
starts and signals workers as it is told over a socket, and tells when they end. When the socket closes, because the
launcher is done or was killed by whatever means, it ends all that is left and then itself. On Linux it adopts orphans,
so that "all" includes processes that workers started and that left their process groups; and should the keeper itself
be killed, the kernel kills the workers.

Messages are lines of JSON, with file descriptors along with those that need them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LAST_WORDS_S = 3.0
"""What workers get to end in good order when the launcher is gone, and strays when it is done."""
STUCK_S = 30.0
"""A process that SIGKILL does not end for so long is stuck in the kernel, and not waited for."""
POLL_S = 0.01
CANNOT_START = 127

if sys.platform == "linux":
    _prctl: Callable[..., int] | None = ctypes.CDLL(None, use_errno=True).prctl
else:
    _prctl = None


class Keeper:
    """Starts, signals and reaps. Workers are known by their ranks."""

    def __init__(self, control: socket.socket, directory: Path | None) -> None:
        """``directory`` has files of the launcher, which are removed if it dies without having said that it is done."""
        self._control = control
        self._directory = directory
        self._received = b""
        self._descriptors: list[int] = []
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._wakeup, wakeup_writer = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(wakeup_writer, False)
        signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the launcher decides when it is over
        if _prctl is not None:
            _prctl(PR_SET_CHILD_SUBREAPER, 1)

    def run(self) -> None:
        """Serve until the launcher hangs up."""
        selector = selectors.DefaultSelector()
        selector.register(self._control, selectors.EVENT_READ)
        selector.register(self._wakeup, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == self._wakeup:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wakeup, 4096)
                    self._reap()
                elif not self._hear():
                    self.end_all()
                    self._remove_directory()
                    return

    def _hear(self) -> bool:
        """Do what is asked for; False once nobody will ask any more."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, 16)
        except OSError:
            return False
        self._descriptors += descriptors
        if not data:
            return False
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))
        return True

    def _obey(self, order: dict[str, Any]) -> None:
        if "start" in order:
            self._start(order["start"], order["command"], order["environment"], order["directory"])
        elif "signal" in order:
            for rank in order["ranks"]:
                worker = self._workers.get(rank)
                if worker is not None:  # it is not reaped yet, so the number is its own
                    with contextlib.suppress(PermissionError):  # it has become another user, or on macOS a zombie
                        try:
                            os.killpg(worker.pid, order["signal"])
                        except ProcessLookupError:
                            os.kill(worker.pid, order["signal"])  # it has moved to another group
        elif "dismiss" in order:
            self._directory = None
        else:
            self.end_all()
            self._tell({"ended": True})

    def _start(self, rank: int, command: list[str], environment: dict[str, str | None], directory: str | None) -> None:
        out, err = self._descriptors[:2]
        del self._descriptors[:2]
        changed = {**os.environ, **environment}
        try:
            worker = self._workers[rank] = subprocess.Popen(  # noqa: S603 - it is there to run what it is told
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={name: value for name, value in changed.items() if value is not None},
                cwd=directory,
                process_group=0,
                preexec_fn=_prepare_worker,  # noqa: PLW1509 - there are no other threads here
            )
        except OSError as error:
            self._tell({"exited": rank, "code": CANNOT_START, "problem": f"cannot run {command[0]}: {error}"})
        else:
            self._tell({"started": rank, "pid": worker.pid})
        finally:
            os.close(out)
            os.close(err)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for rank, worker in list(self._workers.items()):
                if worker.pid == pid:
                    worker.returncode = os.waitstatus_to_exitcode(status)  # or it would look for the process itself
                    del self._workers[rank]
                    self._tell({"exited": rank, "code": worker.returncode})

    def end_all(self) -> None:
        """Ask all processes that are left to end, and after a while make them."""
        deadline = time.monotonic() + LAST_WORDS_S
        asked: set[int] = set()
        while found := set(self._everyone()):
            is_late = time.monotonic() > deadline
            if time.monotonic() > deadline + STUCK_S:
                return
            for pid in found if is_late else found - asked:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL if is_late else signal.SIGTERM)
            asked |= found
            self._reap()
            time.sleep(POLL_S)

    def _everyone(self) -> Iterator[int]:
        """All processes that descend from this one. Without /proc, the workers alone."""
        self._reap()
        if _prctl is None:
            yield from (worker.pid for worker in self._workers.values())
            return
        parents: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    # the name, in brackets, may hold anything; then state and parent: see proc(5)
                    state, parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:2]
                    if state != b"Z":
                        parents[int(entry.name)] = int(parent)
        me = os.getpid()
        for pid in parents:
            ancestor = pid
            while ancestor in parents and ancestor != me:
                ancestor = parents[ancestor]
            if ancestor == me and pid != me:
                yield pid

    def _remove_directory(self) -> None:
        if self._directory is not None:
            with contextlib.suppress(OSError):
                for file in self._directory.iterdir():
                    file.unlink()
                self._directory.rmdir()

    def _tell(self, news: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone: reading will tell as well
            self._control.sendall(json.dumps(news).encode() + b"\n")


def _prepare_worker() -> None:
    """In the worker, before it becomes one."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if _prctl is not None:
        keeper = os.getppid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:  # it died before it could take this one along
            os._exit(CANNOT_START)


if __name__ == "__main__":
    Keeper(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]) if sys.argv[2:] else None).run()
