"""Whose code runs: what a context without a worker of its own finds."""

from __future__ import annotations

import asyncio
import gc
import os
import warnings
import weakref
from contextvars import Context

import pytest

from arpc.agent.scope import find_scope, is_forked, worker_began, worker_ended


class Worker:
    """As a worker does, it refers to its loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop


def found() -> Worker | None:
    scope = Context().run(find_scope)
    return scope.worker if scope is not None else None


async def test_a_context_without_a_worker_finds_the_only_one():
    loop = asyncio.get_running_loop()
    assert found() is None
    one, two = Worker(loop), Worker(loop)
    Context().run(worker_began, one, loop)
    assert found() is one
    Context().run(worker_began, two, loop)
    assert found() is None
    worker_ended(one, loop)
    assert found() is two
    worker_ended(two, loop)
    worker_ended(two, loop)
    assert found() is None


def test_a_worker_that_was_never_shut_down_does_not_keep_its_loop():
    loop = asyncio.new_event_loop()
    worker = Worker(loop)
    Context().run(worker_began, worker, loop)
    loop.close()
    kept = weakref.ref(loop)
    del loop, worker
    gc.collect()
    assert kept() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="takes fork")
def test_a_forked_process_has_no_worker_of_its_parent():
    """Both would write requests with the same numbers to one socket, and take each other's answers."""
    loop = asyncio.new_event_loop()
    worker = Worker(loop)

    def fork() -> int:
        worker_began(worker, loop)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other tests have left threads, which the child does not need
            child = os.fork()
        if child == 0:
            os._exit(0 if find_scope() is None and is_forked() else 1)
        _, status = os.waitpid(child, 0)
        assert find_scope() is not None
        return os.waitstatus_to_exitcode(status)

    assert Context().run(fork) == 0
    assert not is_forked()
    worker_ended(worker, loop)
    loop.close()
