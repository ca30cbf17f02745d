"""The process that keeps the workers of one launch: their parent, so that none of them is ever left behind.

It is run as a script by `arpc.launch.keeping`, imports the standard library only and so is up within milliseconds. It
starts and signals workers as it is told over a socket, and tells when they end. When the socket closes, because the
launcher is done or was killed by whatever means, it ends all that is left and then itself. On Linux it adopts orphans,
so that "all" includes processes that workers started and that left their process groups; and should the keeper itself
be killed, the kernel kills the workers.

If it is told to, it keeps a process from which workers are forked, see `arpc.launch.template`. That one is never
relied on: when it dies, refuses, does nothing at all or takes too long, workers are started as if there were none.

Messages are lines of JSON, with file descriptors along with those that need them.
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
"""What workers get to end in good order when the launcher is gone, and strays when it is done."""
STUCK_S = 30.0
"""A process that SIGKILL does not end for so long is stuck in the kernel, and not waited for."""
POLL_S = 0.01
FORK_S = 300.0
"""After so long workers do not wait any more for a process to be forked from: imports from a far disk take long."""
ASK_S = 5.0
"""A process to be forked from that does not read what it is asked for so long is stuck."""
LOOK_S = 0.5
"""Seconds between two looks at the process that forks workers, while workers wait for it."""
SILENT_LOOKS = 10
"""After so many looks in a row that found it doing nothing, it is stuck."""
STOPPED_LOOKS = 2
"""After so many looks that found it stopped, by a signal or a debugger, it is given up."""
KILL_S = 1.0
"""How long it is waited for when it was killed: one that is stuck in the kernel may take for ever."""
SPARE_DESCRIPTORS = 32
"""What the keeper itself needs, at most."""
CANNOT_START = 127

if sys.platform == "linux":
    _prctl: Callable[..., int] | None = ctypes.CDLL(None, use_errno=True).prctl
else:
    _prctl = None


@dataclass
class Start:
    """A worker that is to be started."""

    rank: int
    command: list[str]
    environment: dict[str, str]
    directory: str | None
    session: bool
    stdin: int
    descriptors: list[int]
    """Its stdout and stderr, and its stdin if that is its own: to be closed once it has them."""
    since: float = field(default_factory=time.monotonic)
    signals: list[int] = field(default_factory=list)
    """What came for it while it was being forked."""

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


class Keeper:
    """Starts, signals and reaps. Workers are known by their ranks."""

    def __init__(self, control: socket.socket, directory: Path | None) -> None:
        """``directory`` has files of the launcher, which are removed if it dies without having said that it is done."""
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
            signal.signal(number, signal.SIG_IGN)  # the launcher decides when it is over
        self._adopts = _prctl is not None and _prctl(PR_SET_CHILD_SUBREAPER, 1) == 0

    def run(self) -> None:
        """Serve until the launcher hangs up."""
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
            self._tell({"ended": True})

    def _signal(self, rank: int, number: int) -> None:
        worker = self._workers.get(rank)
        if worker is not None:  # it is not reaped yet, so the number is its own
            with contextlib.suppress(PermissionError):  # it has become another user, or on macOS a zombie
                try:
                    os.killpg(worker.pid, number)
                except ProcessLookupError:
                    os.kill(worker.pid, number)  # it has moved to another group
        elif self._template is not None:
            forking = self._template.forking
            if forking is not None and forking.rank == rank:
                forking.signals.append(number)
            for start in [start for start in self._template.waiting if start.rank == rank]:
                self._template.waiting.remove(start)
                self._never_started(start, number)

    def _never_started(self, start: Start, number: int) -> None:
        """A worker that waits for its turn has ended by a signal, as it would have while it imported."""
        start.close()
        self._tell({"exited": start.rank, "code": -number})

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
            worker = subprocess.Popen(  # noqa: S603 - it is there to run what it is told
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
            self._tell({"exited": start.rank, "code": CANNOT_START, "problem": problem})
        else:
            self._workers[start.rank] = worker
            self._tell({"started": start.rank, "pid": worker.pid})
        finally:
            start.close()

    # -- the template --------------------------------------------------------------------------------------------------

    def _warm(self, command: list[str], environment: dict[str, str | None]) -> None:
        """Start the process that workers are forked from. They wait for it, but not for long."""
        if not self._adopts or self._template is not None:
            return
        ours, theirs = socket.socketpair()
        merged = _merged(environment)
        said = os.memfd_create("stderr")  # workers say it again, as they would if they imported themselves
        try:
            process = subprocess.Popen(  # noqa: S603 - it is there to run what it is told
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
        """The worker is known: it may run."""
        start.close()
        self._workers[start.rank] = Forked(pid)
        self._tell({"started": start.rank, "pid": pid})
        early = template.early.get(pid)
        if early is not None:  # and so reaped: the number may be another's by now
            self._exited(start.rank, early)
            return
        for number in start.signals:
            self._signal(start.rank, number)
        with contextlib.suppress(BrokenPipeError):  # somebody was quick to kill it
            os.write(template.permit, b".")

    def _lose_template(self, *, start_others: bool = True) -> None:
        """Do without the template from now on. Whom it was about to fork is not permitted to run, and executed."""
        template, self._template = self._template, None
        if template is None:
            return
        self._selector.unregister(template.line)
        template.line.close()
        template.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            template.process.wait(KILL_S)  # it can do nothing any more, and is reaped when it ends
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
        """How long to wait for news before the template is looked at again, if workers wait for it."""
        template = self._template
        return None if template is None or not (template.waiting or template.forking) else LOOK_S

    def _look_at_template(self) -> None:
        """Give the template up if it does nothing while workers wait for it, or does it for too long."""
        template = self._template
        if template is None or not (template.waiting or template.forking):
            return
        now = time.monotonic()
        since = (template.forking or template.waiting[0]).since
        problem = template.pulse.problem(now)
        if not problem and now - since > FORK_S:
            problem = f"has not been ready for {FORK_S:g} s"
        if problem:
            self._tell({"unforked": f"the process that workers are forked from, {template.process.pid}, {problem}"})
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
        worker.returncode = os.waitstatus_to_exitcode(status)  # or Popen would look for the process itself
        self._tell({"exited": rank, "code": worker.returncode})

    def _reaped_stranger(self, pid: int, status: int) -> None:
        template = self._template
        if template is None:
            return
        if pid == template.process.pid:
            template.process.returncode = os.waitstatus_to_exitcode(status)  # its line tells the rest
        elif template.forking is not None:
            template.early[pid] = status  # a worker may end before the template has told of it

    def end_all(self) -> None:
        """Ask all processes that are left to end, and after a while make them. The template stays for others."""
        if self._template is not None and (self._template.forking or self._template.waiting):
            self._lose_template(start_others=False)  # or it would fork one more behind our back
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
        """All processes that descend from this one but for the template. Without /proc, the workers alone."""
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

    def _tell(self, news: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone: reading will tell as well
            self._control.sendall(json.dumps(news).encode() + b"\n")


class Template:
    """The keeper's end of the process that workers are forked from. It is asked for one worker at a time."""

    def __init__(self, process: subprocess.Popen[bytes], line: socket.socket, environment: dict[str, str]) -> None:
        self.process = process
        self.line = line
        self.received = b""
        self.is_warm = False
        self.pulse = Pulse(process.pid)
        self.waiting: deque[Start] = deque()
        self.forking: Start | None = None
        self.permit = -1
        """A byte written there lets the worker that is being forked run; closing it, end."""
        self.early: dict[int, int] = {}
        """How unknown processes ended while a worker was being forked, by their ids."""
        self._environment = environment

    def has_room_for(self, start: Start) -> bool:
        """Whether one more may wait: each keeps descriptors, and without any the keeper could do nothing else."""
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
            "keeper": os.getpid(),
        }
        data = json.dumps(order).encode() + b"\n"
        socket.send_fds(self.line, [data[:1]], [*start.streams, permission])
        self.line.sendall(data[1:])


class Pulse:
    """Whether a process does anything: uses a CPU, reads, or waits for a disk. One that only sleeps may be stuck.

    Looks are counted, and not time, which also passes while this process itself is stopped.
    """

    def __init__(self, pid: int) -> None:
        self._directory = Path(f"/proc/{pid}")
        self._seen: tuple[bytes, ...] = ()
        self._silent_looks = 0
        self._looked_at = 0.0

    def problem(self, now: float) -> str:
        """Look, if it is time to, and say what is wrong: nothing, if it is well or has ended."""
        if now < self._looked_at + LOOK_S:
            return ""
        self._looked_at = now
        try:
            # the name, in brackets, may hold anything; see proc(5) for what follows
            state, *numbers = (self._directory / "stat").read_bytes().rpartition(b")")[2].split()
            read = (self._directory / "io").read_bytes().split()[1]
        except (OSError, IndexError):
            return ""  # it has ended, which its line tells, or it is not to be seen
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
    """This process's environment with these changes; None removes."""
    return {name: value for name, value in {**os.environ, **environment}.items() if value is not None}


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
