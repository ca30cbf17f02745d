"""A test that hangs is ended, says where it hung, and does not take the tests after it along.

A test has the limit of pytest-timeout for all of its phases, and faulthandler's for one that is stuck in C. These hooks
add what both lack: what runs on a loop ends in an orderly way, and a teardown is limited after a failure as well.
`tests/conftest.py` registers them.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from types import FrameType
from typing import Any, Final

import pytest
import pytest_timeout
from _pytest.faulthandler import fault_handler_stderr_fd_key

# How long what was cancelled may take to unwind before it is left as it is. A bound, and far from what it takes.
UNWINDING_S: Final = 30.0

_phase_runs: Final = pytest.StashKey[bool]()
"""The setup, the test itself or its teardown is under way, and not pytest's own work between them."""
_timed_out: Final = pytest.StashKey[str]()
"""What the limit had to say, of a test that was cancelled and has not ended yet."""


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> Iterator[None]:
    result = yield
    if settings.method == "signal":
        fail = signal.getsignal(signal.SIGALRM)
        signal.signal(signal.SIGALRM, functools.partial(_on_alarm, item, fail))
        # Again and again: the next fixture may hang as well
        signal.setitimer(signal.ITIMER_REAL, settings.timeout, UNWINDING_S)
    return result


def _on_alarm(
    item: pytest.Item, fail: Callable[[int, FrameType | None], None], signum: int, frame: FrameType | None
) -> None:
    if not item.stash.get(_phase_runs, False):
        return  # raised in pytest's own code it would end the run; there will be another
    if pytest_timeout.is_debugging():
        return
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        fail(signum, frame)
        return
    for task in asyncio.all_tasks(loop):
        task.print_stack(file=sys.stderr)
    main, running = _main_task(), asyncio.current_task(loop)
    if _timed_out not in item.stash and main is not None and not main.done() and running is not main:
        # It unwinds as it would in a program: what it has opened is closed before its fixtures are torn down
        try:
            fail(signum, frame)
        except pytest.fail.Exception as failure:
            item.stash[_timed_out] = str(failure)
        main.cancel()
        loop.call_soon_threadsafe(lambda: None)  # it is asleep, and knows nothing of signals
        return
    # What a signal handler raises while uvloop waits ends up in the loop's exception handler, and the wait goes on:
    # the loop itself must stop. The plain loop lets it through, and would keep the stop for its next run.
    if not isinstance(loop, asyncio.BaseEventLoop) and running is None:
        loop.call_soon_threadsafe(loop.stop)
    fail(signum, frame)


def _main_task() -> asyncio.Task[Any] | None:
    """What the `asyncio.Runner` at work runs: it keeps it where a keyboard interrupt finds it, and nowhere else."""
    handler = signal.getsignal(signal.SIGINT)
    return handler.keywords.get("main_task") if isinstance(handler, functools.partial) else None


def _run_phase(item: pytest.Item) -> Generator[None, Any, Any]:
    """Ended by an alarm, and by none that comes before or after. If it was cancelled it has failed, whatever it did."""
    error: BaseException | None = None
    result = None
    item.stash[_phase_runs] = True
    try:
        result = yield
    except BaseException as raised:  # noqa: BLE001 - it is raised below
        error = raised
    finally:
        item.stash[_phase_runs] = False
    text = item.stash.get(_timed_out, None)
    if text is not None:
        del item.stash[_timed_out]
        raise pytest.fail.Exception(text) from error
    if error is not None:
        raise error
    return result


# Inside of all other wrappers: what pytest does around a phase is not interrupted


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _run_phase(item))


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _run_phase(item))


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _run_phase(item))


@pytest.hookimpl(wrapper=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> Generator[None, Any, Any]:
    """Both limits are lifted when a test has failed, for somebody who debugs it. Its teardown is to have them again."""
    result = yield
    config = node.config
    if isinstance(node, pytest.Item) and not config.getoption("usepdb"):
        settings = pytest_timeout._get_item_settings(node)
        if settings.timeout:
            config.hook.pytest_timeout_set_timer(item=node, settings=settings)
        limit_s = float(config.getini("faulthandler_timeout") or 0.0)
        if limit_s:
            file = config.stash[fault_handler_stderr_fd_key]
            faulthandler.dump_traceback_later(limit_s, exit=config.getini("faulthandler_exit_on_timeout"), file=file)
    return result
