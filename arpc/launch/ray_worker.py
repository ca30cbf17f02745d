"""The actor of each worker on a Ray cluster: it runs a function itself, or a script in a child process."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import traceback
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import cloudpickle

from arpc.launch.meeting import StoreServer
from arpc.launch.output import LineSplitter, Tail, reading
from arpc.launch.plan import Slot
from arpc.launch.supervisor_process import Exited, News, SupervisorLost, SupervisorProcess
from arpc.runner import run

__all__ = ["End", "RayWorker", "Ready"]

SUPERVISOR_LOST: Final = -9


@dataclass(frozen=True, slots=True)
class Ready:
    """The location of an actor and the id of its present life: each restart has a new one."""

    life: str
    node: str
    address: str


@dataclass(frozen=True, slots=True)
class End:
    """The end of a worker: its exit code, and the pickled result if it succeeded."""

    exit_code: int
    traceback: str = ""
    result: bytes | None = None
    is_lost: bool = False
    """True if the actor itself has died."""


class RayWorker:
    """The actor. Ray restarts it in a new process, with a new life id and no state of the one before."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._life = uuid.uuid4().hex
        self._server: StoreServer | None = None

    def __repr__(self) -> str:
        return self._slot.name  # Ray prefixes the lines that this process prints with it

    def ready(self) -> Ready:
        """Return the location of this process; the reply shows that it runs."""
        import ray

        return Ready(self._life, ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())

    def open_meeting(self) -> tuple[str, int]:
        """Serve the store of the group, as long as this process lives. Return its host and port."""
        import ray

        server = self._server = StoreServer(ray.util.get_node_ip_address())
        server.serve_blocking()
        return server.host, server.port

    def run_function(self, environment: Mapping[str, str], package: bytes) -> End:
        """Run the function in this process, and return how it ended."""
        os.environ.update(environment)
        try:
            function, args = pickle.loads(package)
            result = function(*args)
            if hasattr(result, "__await__"):
                result = run(result)
            return End(0, result=cloudpickle.dumps(result))
        except SystemExit as error:
            return End(_code_of(error))
        except BaseException:  # noqa: BLE001 - the launcher must receive every end
            traceback.print_exc()
            return End(1, traceback.format_exc().rstrip())

    def run_command(self, environment: Mapping[str, str], arguments: Sequence[str]) -> End:
        """Run a script or a module in a process that ends with this one, and print its output."""
        return asyncio.run(_run_command([sys.executable, *arguments], environment))


def _code_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
    return 1


async def _run_command(command: Sequence[str], environment: Mapping[str, str]) -> End:
    news: asyncio.Queue[News] = asyncio.Queue()
    tail = Tail()
    readers, writers = zip(os.pipe(), os.pipe(), strict=True)
    pumps = [
        asyncio.create_task(_pump(reader, stream, tail))
        for reader, stream in zip(readers, (sys.stdout, sys.stderr), strict=True)
    ]
    supervisor = await SupervisorProcess.open(news.put_nowait)
    try:
        try:
            await supervisor.start(0, command, environment=environment, directory=None, output=writers)
        finally:
            for writer in writers:
                os.close(writer)
        while True:
            match await news.get():
                case Exited(_, exit_code, problem):
                    break
                case SupervisorLost():
                    exit_code, problem = SUPERVISOR_LOST, "the process that keeps the worker was killed"
                    break
                case _:
                    pass
    finally:
        await supervisor.aclose()
        await asyncio.wait(pumps)  # no process is left that could write there
    return End(exit_code, problem or tail.traceback)


async def _pump(descriptor: int, stream: Any, tail: Tail) -> None:
    splitter = LineSplitter()
    async with reading(descriptor) as reader:
        while data := await reader.read(1 << 16):
            for line in splitter.feed(data):
                _show(line, stream, tail)
    for line in splitter.end():
        _show(line, stream, tail)


def _show(line: str, stream: Any, tail: Tail) -> None:
    if stream is sys.stderr:
        tail.add(line)
    print(line, file=stream, flush=True)  # Ray forwards it to the driver
