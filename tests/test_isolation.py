"""Tests that hang, fail in the middle of their teardown or leave something running: the next one does not notice."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[1]

CONFTEST = """
from tests.conftest import _task_watch, no_child_left, no_task_left, pytest_asyncio_loop_factories, pytest_configure
"""

# Alarms are brought about where they are wanted: how fast the machine is does not matter.
PROGRAM = """
import asyncio
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import psutil
import pytest

import arpc
from arpc.testing import cluster
from tests import remains

remains.THREAD_END_S = 0.1
loops = set()
forgotten = []


@pytest.fixture(autouse=True)
async def nothing_of_others_is_left():
    with pytest.raises(arpc.NotInitializedError):
        arpc.get_worker_info()
    loop = asyncio.get_running_loop()
    assert loop not in loops
    loops.add(loop)
    assert len(asyncio.all_tasks()) == 1
    assert set(threading.enumerate()) <= {threading.main_thread(), *forgotten}
    assert not [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
async def group():
    async with cluster(2) as workers:
        yield workers


def let_time_pass(*, for_unwinding=False):
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02 if for_unwinding else 0)


async def test_that_hangs(group):
    async with cluster(["a", "b"]) as inner:
        call = inner["a"].rpc_async("b", asyncio.Event().wait)
        let_time_pass()
        await call


async def test_that_does_not_let_itself_be_cancelled():
    let_time_pass(for_unwinding=True)
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    await asyncio.Event().wait()


def test_that_hangs_on_a_loop_of_its_own():
    async def main():
        async with cluster(2):
            let_time_pass()
            await asyncio.Event().wait()

    asyncio.run(main())


def test_that_hangs_without_a_loop():
    let_time_pass()
    threading.Event().wait()


@pytest.fixture
async def end_that_fails(group):
    async with cluster(["a", "b"]) as inner:
        yield inner
        raise ZeroDivisionError


async def test_end_that_fails(end_that_fails):
    assert arpc.get_worker_info().name == "a"


@pytest.fixture
async def end_that_is_cancelled(group):
    yield
    raise asyncio.CancelledError


async def test_end_that_is_cancelled(end_that_is_cancelled):
    pass


@pytest.fixture
async def end_that_hangs(group):
    async with cluster(["a", "b"]):
        yield
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0  # after a failure too
        let_time_pass()
        await asyncio.Event().wait()


async def test_end_that_hangs(end_that_hangs):
    pass


async def test_failure_whose_end_hangs(end_that_hangs):
    raise ZeroDivisionError


async def test_that_leaves_a_process():
    forgotten.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]))


def test_that_leaves_a_thread():
    thread = threading.Thread(target=threading.Event().wait, name="forgotten")
    forgotten.append(thread)
    thread.start()


async def test_that_is_fine(group):
    assert await group[0].rpc_sync("worker1", abs, args=(-1,)) == 1
"""

WHAT_BECOMES_OF_THEM = {
    "test_that_hangs": {"FAILED"},
    "test_that_does_not_let_itself_be_cancelled": {"FAILED", "ERROR"},
    "test_that_hangs_on_a_loop_of_its_own": {"FAILED"},
    "test_that_hangs_without_a_loop": {"FAILED"},
    "test_end_that_fails": {"PASSED", "ERROR"},
    "test_end_that_is_cancelled": {"PASSED", "ERROR"},
    "test_end_that_hangs": {"PASSED", "ERROR"},
    "test_failure_whose_end_hangs": {"FAILED", "ERROR"},
    "test_that_leaves_a_process": {"PASSED", "ERROR"},
    "test_that_leaves_a_thread": {"PASSED", "ERROR"},
    "test_that_is_fine": {"PASSED"},
}


def test_what_one_test_does_is_nothing_to_the_next(pytester: pytest.Pytester):
    pytester.makeconftest(CONFTEST)
    program = pytester.makepyfile(PROGRAM)
    # that it ends is the last thing to show: a thread that goes on does not keep it
    settings = ["-c", ROOT / "pyproject.toml", f"--rootdir={pytester.path}", "-p", "no:cacheprovider"]
    run = pytester.runpytest_subprocess(*settings, "-rA", program)
    outcomes = defaultdict(set)
    for outcome, name in re.findall(r"^(PASSED|FAILED|ERROR) .*::(\w+)", run.stdout.str(), re.MULTILINE):
        outcomes[name].add(outcome)
    assert outcomes == WHAT_BECOMES_OF_THEM
    assert run.ret is pytest.ExitCode.TESTS_FAILED
    run.stdout.fnmatch_lines(["*left behind by the test:", "*Thread(forgotten, *"])
    run.stdout.fnmatch_lines_random(["*child processes left behind*", "*fixture 'end_that_is_cancelled' raised*"])
    run.stderr.fnmatch_lines(["the run ends without its threads:", "*Thread(forgotten, *"])
