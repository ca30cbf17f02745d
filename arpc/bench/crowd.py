"""More callees than one: processes that the callee of a pair starts, all from one that has imported what they need."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from arpc.bench.processes import die_with_parent

__all__ = ["crowd"]

JOIN_S = 10.0


@contextmanager
def crowd(
    target: Callable[..., None], arguments: Sequence[tuple[object, ...]], preload: list[str]
) -> Iterator[Callable[[], None]]:
    """Runs ``target(stay, *arguments)`` in a process for each of `arguments`; `stay()` blocks until it is to end.

    That is when what this yields is called, or at the end of the block.

    The modules of `preload` are imported once, before the processes fork from there: sixty imports of torch take long.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload)
    ends: list[Connection] = []
    processes: list[BaseProcess] = []

    def dismiss() -> None:
        for end in ends:
            end.close()
        ends.clear()

    try:
        for one in arguments:
            ours, theirs = context.Pipe()
            process = context.Process(target=_member, args=(target, theirs, one), daemon=True)
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        yield dismiss
    finally:
        dismiss()
        for member in processes:
            member.join(JOIN_S)
            if member.is_alive():
                member.kill()
                member.join()


def _member(target: Callable[..., None], end: Connection, arguments: tuple[object, ...]) -> None:
    die_with_parent()

    def stay() -> None:
        try:
            end.recv()
        except (EOFError, OSError):
            return  # the callee that started this has closed its end, or is no more

    target(stay, *arguments)
