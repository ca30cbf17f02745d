"""The supervisor: the parent process of the workers of one launch, so that none of them is ever left behind.

`arpc.launch.supervisor_process` runs it as a script. It imports the standard library only and so is up within
milliseconds. It receives orders to start and signal workers over a socket, and reports when they end. When the socket
closes, because the launcher is done or was killed by whatever means, the supervisor ends all remaining processes and
then itself. On Linux it adopts orphans, so that these include processes that workers started and that left their
process groups; and if the supervisor itself is killed, the kernel kills the workers.

On request the supervisor starts the template, a process from which workers are forked, see `arpc.launch.template`. It
never depends on the template: if that dies, refuses, hangs or takes too long, workers are started as if there were
none.

Messages are lines of JSON, sent together with the file descriptors that they need.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LAST_WORDS_S = 3.0
"""Seconds from SIGTERM to SIGKILL for workers when the launcher is gone, and for stray processes when it is done."""
STUCK_S = 30.0
"""Seconds after which a process that SIGKILL did not end counts as stuck in the kernel, and is not waited for."""
POLL_S = 0.01
FORK_S = 300.0
"""Seconds after which workers stop waiting for the template: imports from a network disk take long."""
ASK_S = 5.0
"""Seconds after which a template that does not read an order is stuck."""
LOOK_S = 0.5
"""Seconds between two checks of the template, while workers wait for it."""
SILENT_LOOKS = 10
"""The number of checks in a row without any activity after which the template is stuck."""
STOPPED_LOOKS = 2
"""The number of checks in a row after which a template that a signal or a debugger has stopped is given up."""
KILL_S = 1.0
"""Seconds to wait for a template that was killed: one that is stuck in the kernel may never end."""
SPARE_DESCRIPTORS = 32
"""The most file descriptors that the supervisor itself needs."""
CANNOT_START = 127

if sys.platform == "linux":
    _prctl: Callable[..., int] | None = ctypes.CDLL(None, use_errno=True).prctl
else:
    _prctl = None


@dataclass
class Start:
    """A worker to start."""

    rank: int
    command: list[str]
    environment: dict[str, str]
    directory: str | None
    session: bool
    stdin: int
    descriptors: list[int]
    """The worker's own stdin, if it has one, its stdout and its stderr: to be closed once the worker has them."""
    since: float = field(default_factory=time.monotonic)
    signals: list[int] = field(default_factory=list)
    """The signals that arrived for the worker while it was being forked."""

    @property
    def streams(self) -> tuple[int, int, int]:
        stdout, stderr = self.descriptors[-2:]
        return self.stdin, stdout, stderr

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


@dataclass
class Forked:
    """A worker that was forked from the template."""

    pid: int
    returncode: int | None = None


class Supervisor:
    """Starts, signals and reaps workers, which are identified by their ranks."""

    def __init__(self, control: socket.socket, directory: Path | None) -> None:
        """``directory`` has files of the launcher, which are removed if the launcher dies before it sends "dismiss"."""
        self._control = control
        self._directory = directory
        self._received = b""
        self._descriptors: list[int] = []
        self._workers: dict[int, subprocess.Popen[bytes] | Forked] = {}
        self._selector = selectors.DefaultSelector()
        self._template: Template | None = None
        self._nothing = os.open(os.devnull, os.O_RDWR)
        self._wakeup, wakeup_writer = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(wakeup_writer, False)
        signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the launcher decides when to end
        self._adopts = _prctl is not None and _prctl(PR_SET_CHILD_SUBREAPER, 1) == 0

    def run(self) -> None:
        """Serve until the launcher closes the socket."""
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(self._patience_s()):
                if key.fileobj == self._wakeup:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wakeup, 4096)
                    self._reap()
                elif key.fileobj != self._control:
                    self._hear_template()
                elif not self._hear():
                    self._lose_template(start_others=False)
                    self.end_all()
                    self._remove_directory()
                    return
            self._look_at_template()

    def _hear(self) -> bool:
        """Read and carry out orders; return False once the launcher has closed the socket."""
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
            self._start(order)
        elif "template" in order:
            self._warm(order["template"], order["environment"])
        elif "signal" in order:
            for rank in order["ranks"]:
                self._signal(rank, order["signal"])
        elif "dismiss" in order:
            self._directory = None
        else:
            self.end_all()
            self._report({"ended": True})

    def _signal(self, rank: int, number: int) -> None:
        worker = self._workers.get(rank)
        if worker is not None:  # it is not reaped yet, so the pid is still its own
            with contextlib.suppress(PermissionError):  # it runs as another user now, or on macOS is a zombie
                try:
                    os.killpg(worker.pid, number)
                except ProcessLookupError:
                    os.kill(worker.pid, number)  # it has moved to another process group
        elif self._template is not None:
            forking = self._template.forking
            if forking is not None and forking.rank == rank:
                forking.signals.append(number)
            for start in [start for start in self._template.waiting if start.rank == rank]:
                self._template.waiting.remove(start)
                self._never_started(start, number)

    def _never_started(self, start: Start, number: int) -> None:
        """Report a worker that waits for its turn as ended by a signal, as if it had come during the imports."""
        start.close()
        self._report({"exited": start.rank, "code": -number})

    def _start(self, order: dict[str, Any]) -> None:
        count = 3 if order["input"] else 2
        descriptors = self._descriptors[:count]
        del self._descriptors[:count]
        start = Start(
            order["start"],
            order["command"],
            _merged(order["environment"]),
            order["directory"],
            order["session"],
            descriptors[0] if order["input"] else self._nothing,
            descriptors,
        )
        if order["fork"] and self._template is not None and self._template.has_room_for(start):
            self._template.waiting.append(start)
            self._fork_next()
        else:
            self._execute(start)

    def _execute(self, start: Start) -> None:
        stdin, stdout, stderr = start.streams
        try:
            worker = subprocess.Popen(  # noqa: S603 - to run commands is its purpose
                start.command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=start.environment,
                cwd=start.directory,
                process_group=None if start.session else 0,
                start_new_session=start.session,
                preexec_fn=_prepare_worker,  # noqa: PLW1509 - there are no other threads here
            )
        except OSError as error:
            problem = f"cannot run {start.command[0]}: {error}"
            self._report({"exited": start.rank, "code": CANNOT_START, "problem": problem})
        else:
            self._workers[start.rank] = worker
            self._report({"started": start.rank, "pid": worker.pid})
        finally:
            start.close()

    # -- the template --------------------------------------------------------------------------------------------------

    def _warm(self, command: list[str], environment: dict[str, str | None]) -> None:
        """Start the template. Workers wait for it, for `FORK_S` at most."""
        if not self._adopts or self._template is not None:
            return
        ours, theirs = socket.socketpair()
        merged = _merged(environment)
        said = os.memfd_create("stderr")  # each worker repeats it, as if it had done the imports itself
        try:
            process = subprocess.Popen(  # noqa: S603 - to run commands is its purpose
                [str(theirs.fileno()) if part == "{descriptor}" else part for part in command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
                env=merged,
                process_group=0,
                pass_fds=(theirs.fileno(),),
                preexec_fn=_prepare_worker,  # noqa: PLW1509 - there are no other threads here
            )
        except OSError:
            ours.close()
            return
        finally:
            os.close(said)
            theirs.close()
        ours.settimeout(ASK_S)
        self._template = Template(process, ours, merged)
        self._selector.register(ours, selectors.EVENT_READ)

    def _fork_next(self) -> None:
        template = self._template
        if template is None or not template.is_warm or template.forking is not None or not template.waiting:
            return
        start = template.forking = template.waiting.popleft()
        template.early.clear()
        permission, template.permit = os.pipe()
        try:
            template.ask(start, permission)
        except OSError:
            self._lose_template()
        finally:
            os.close(permission)

    def _hear_template(self) -> None:
        template = self._template
        if template is None:
            return
        try:
            data = template.line.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._lose_template()
            return
        *lines, template.received = (template.received + data).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            if "warm" in answer:
                template.is_warm = True
            elif template.forking is not None:
                start, template.forking = template.forking, None
                if "forked" in answer:
                    self._adopt(start, answer["forked"], template)
                else:
                    self._execute(start)
                os.close(template.permit)
        self._fork_next()

    def _adopt(self, start: Start, pid: int, template: Template) -> None:
        """Record and report a forked worker, and let it run."""
        start.close()
        self._workers[start.rank] = Forked(pid)
        self._report({"started": start.rank, "pid": pid})
        early = template.early.get(pid)
        if early is not None:  # and is reaped: its pid may be another process's by now
            self._exited(start.rank, early)
            return
        for number in start.signals:
            self._signal(start.rank, number)
        with contextlib.suppress(BrokenPipeError):  # the worker has been killed already
            os.write(template.permit, b".")

    def _lose_template(self, *, start_others: bool = True) -> None:
        """Give the template up. A worker that it is about to fork is not permitted to run, and is executed instead."""
        template, self._template = self._template, None
        if template is None:
            return
        self._selector.unregister(template.line)
        template.line.close()
        template.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            template.process.wait(KILL_S)  # else `_reap` reaps it when it ends
        starts = list(template.waiting)
        if template.forking is not None:
            os.close(template.permit)
            starts.insert(0, template.forking)
        for start in starts:
            if not start_others or start.signals:
                self._never_started(start, start.signals[0] if start.signals else signal.SIGTERM)
            else:
                self._execute(start)

    def _patience_s(self) -> float | None:
        """Return the seconds until the next check of the template, or None if no worker waits for it."""
        template = self._template
        return None if template is None or not (template.waiting or template.forking) else LOOK_S

    def _look_at_template(self) -> None:
        """Give the template up if it does nothing while workers wait for it, or takes too long."""
        template = self._template
        if template is None or not (template.waiting or template.forking):
            return
        now = time.monotonic()
        since = (template.forking or template.waiting[0]).since
        problem = template.activity.problem(now)
        if not problem and now - since > FORK_S:
            problem = f"has not been ready for {FORK_S:g} s"
        if problem:
            self._report({"unforked": f"the process that workers are forked from, {template.process.pid}, {problem}"})
            self._lose_template()

    # -- the end -------------------------------------------------------------------------------------------------------

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
                    self._exited(rank, status)
                    break
            else:
                self._reaped_stranger(pid, status)

    def _exited(self, rank: int, status: int) -> None:
        worker = self._workers.pop(rank)
        worker.returncode = os.waitstatus_to_exitcode(status)  # or Popen would wait for the process itself
        self._report({"exited": rank, "code": worker.returncode})

    def _reaped_stranger(self, pid: int, status: int) -> None:
        template = self._template
        if template is None:
            return
        if pid == template.process.pid:
            template.process.returncode = os.waitstatus_to_exitcode(status)  # the end of its socket does the rest
        elif template.forking is not None:
            template.early[pid] = status  # a worker may end before the template has reported it

    def end_all(self) -> None:
        """Ask all remaining processes to end, and kill them after a while. An idle template is kept."""
        if self._template is not None and (self._template.forking or self._template.waiting):
            self._lose_template(start_others=False)  # or it might fork one more worker meanwhile
        deadline = time.monotonic() + LAST_WORDS_S
        asked: set[int] = set()
        while found := set(self._descendants()):
            is_late = time.monotonic() > deadline
            if time.monotonic() > deadline + STUCK_S:
                return
            for pid in found if is_late else found - asked:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL if is_late else signal.SIGTERM)
            asked |= found
            self._reap()
            time.sleep(POLL_S)

    def _descendants(self) -> Iterator[int]:
        """Yield the pids of all descendants of this process except the template. Without /proc, of the workers only."""
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
        spared = {me} if self._template is None else {me, self._template.process.pid}
        for pid in parents:
            ancestor = pid
            while ancestor in parents and ancestor != me:
                ancestor = parents[ancestor]
            if ancestor == me and pid not in spared:
                yield pid

    def _remove_directory(self) -> None:
        if self._directory is not None:
            with contextlib.suppress(OSError):
                for file in self._directory.iterdir():
                    file.unlink()
                self._directory.rmdir()

    def _report(self, news: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone: reading the socket reports it
            self._control.sendall(json.dumps(news).encode() + b"\n")


class Template:
    """The supervisor's end of the process that workers are forked from. It forks one worker at a time."""

    def __init__(self, process: subprocess.Popen[bytes], line: socket.socket, environment: dict[str, str]) -> None:
        self.process = process
        self.line = line
        self.received = b""
        self.is_warm = False
        self.activity = ActivityMonitor(process.pid)
        self.waiting: deque[Start] = deque()
        self.forking: Start | None = None
        self.permit = -1
        """The write end of a pipe: a byte lets the worker that is being forked run; closing the pipe makes it exit."""
        self.early: dict[int, int] = {}
        """The wait statuses of unknown processes that ended while a worker was being forked, by pid."""
        self._environment = environment

    def has_room_for(self, start: Start) -> bool:
        """Whether one more worker may wait: each has descriptors open, and the supervisor must not run out."""
        kept = sum(len(waiting.descriptors) for waiting in (*self.waiting, start))
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return limit == resource.RLIM_INFINITY or kept + SPARE_DESCRIPTORS <= limit

    def ask(self, start: Start, permission: int) -> None:
        names = self._environment.keys() | start.environment.keys()
        wanted = {name: start.environment.get(name) for name in names}
        order = {
            "command": start.command,
            "environment": {n: value for n, value in wanted.items() if value != self._environment.get(n)},
            "session": start.session,
            "supervisor": os.getpid(),
        }
        data = json.dumps(order).encode() + b"\n"
        socket.send_fds(self.line, [data[:1]], [*start.streams, permission])
        self.line.sendall(data[1:])


class ActivityMonitor:
    """Checks whether a process does anything: uses a CPU, reads, or waits for a disk. One that only sleeps may hang.

    It counts checks instead of time, which also passes while this process itself is stopped.
    """

    def __init__(self, pid: int) -> None:
        self._directory = Path(f"/proc/{pid}")
        self._seen: tuple[bytes, ...] = ()
        self._silent_looks = 0
        self._looked_at = 0.0

    def problem(self, now: float) -> str:
        """Check the process, if a check is due. Return the problem; empty if it is well or has ended."""
        if now < self._looked_at + LOOK_S:
            return ""
        self._looked_at = now
        try:
            # the name, in brackets, may hold anything; see proc(5) for what follows
            state, *numbers = (self._directory / "stat").read_bytes().rpartition(b")")[2].split()
            read = (self._directory / "io").read_bytes().split()[1]
        except (OSError, IndexError):
            return ""  # it has ended, which its socket reports, or is not visible
        faults_and_times = (numbers[6], numbers[8], numbers[10], numbers[11])
        seen = (*faults_and_times, read)
        is_stopped = state in b"Tt"
        if seen != self._seen or state in b"RD":
            self._seen, self._silent_looks = seen, 0
            return ""
        self._silent_looks += 1
        if is_stopped and self._silent_looks >= STOPPED_LOOKS:
            return "is stopped"
        return "does nothing" if self._silent_looks >= SILENT_LOOKS else ""


def _merged(environment: dict[str, str | None]) -> dict[str, str]:
    """Return this process's environment with these changes; None removes a variable."""
    return {name: value for name, value in {**os.environ, **environment}.items() if value is not None}


def _prepare_worker() -> None:
    """Reset signal handlers, and die with the supervisor. Runs in the child before it executes the worker's command."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if _prctl is not None:
        supervisor = os.getppid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # the supervisor died before the prctl
            os._exit(CANNOT_START)


if __name__ == "__main__":
    Supervisor(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]) if sys.argv[2:] else None).run()
