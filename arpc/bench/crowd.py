"""Further callees: processes that are forked from the callee of a pair before it has a loop or a thread."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from arpc.bench.processes import die_with_parent

__all__ = ["crowd"]

JOIN_S = 10.0


@contextmanager
def crowd(target: Callable[..., None], arguments: Sequence[tuple[object, ...]]) -> Iterator[Callable[[], None]]:
    """Run ``target(stay, *arguments)`` in a process for each of `arguments`; `stay()` blocks until it should end.

    That is when the function that this yields is called, or at the end of the block.
    """
    context = multiprocessing.get_context("fork")
    ends: list[Connection] = []
    processes: list[BaseProcess] = []

    def dismiss() -> None:
        for end in ends:
            end.close()
        ends.clear()

    try:
        for one in arguments:
            ours, theirs = context.Pipe()
            ends.append(ours)
            process = context.Process(target=_member, args=(target, theirs, tuple(ends), one), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
        yield dismiss
    finally:
        dismiss()
        for member in processes:
            member.join(JOIN_S)
            if member.is_alive():
                member.kill()
                member.join()


def _member(
    target: Callable[..., None], end: Connection, inherited: Sequence[Connection], arguments: tuple[object, ...]
) -> None:
    die_with_parent()
    os.dup2(2, 1)  # stdout is the connection between the callee and the main process
    for other in inherited:
        other.close()  # or no process would notice that the callee closes them

    def stay() -> None:
        try:
            end.recv()
        except (EOFError, OSError):
            return  # the callee that started this has closed its end, or has died

    target(stay, *arguments)
