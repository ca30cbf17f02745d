"""What every test gets: the chosen event loop, hypothesis' settings, a limit, and proof that it left nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import io
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Final

import hypothesis
import psutil
import pytest

from arpc.private.switch import PUBLIC_ONLY
from tests import remains, timeouts

# -- hypothesis -------------------------------------------------------------------------------------------------------

# No deadline for one example: on a shared machine it measures the neighbours, and each test has its timeout already.
hypothesis.settings.register_profile("default", deadline=None)
# The same examples in every run: a change is to blame for what it breaks, not the dice.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")

# -- the event loop ---------------------------------------------------------------------------------------------------

LOOP_FACTORIES: Final[dict[str, Callable[[], asyncio.AbstractEventLoop]]] = {"asyncio": asyncio.new_event_loop}
try:
    import uvloop
except ImportError:  # there is none for Windows
    pass
else:
    LOOP_FACTORIES["uvloop"] = uvloop.new_event_loop


def _loop_name() -> str:
    """The loop that async tests run on: ``ARPC_TEST_LOOP``, or uvloop where it can be had."""
    name = os.environ.get("ARPC_TEST_LOOP") or ("uvloop" if "uvloop" in LOOP_FACTORIES else "asyncio")
    if name not in LOOP_FACTORIES:
        raise pytest.UsageError(f"ARPC_TEST_LOOP={name}: choose one of {', '.join(sorted(LOOP_FACTORIES))}")
    return name


def pytest_report_header() -> str:
    return f"event loop: {_loop_name()}"


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    name = _loop_name()
    return {name: LOOP_FACTORIES[name]}


# -- hooks with a subject of their own ---------------------------------------------------------------------------------


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if PUBLIC_ONLY:
        left_out = [item for item in items if item.get_closest_marker("private_apis") is not None]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts background commands with SIGINT ignored, nohup does so with SIGHUP, and child processes inherit it:
    # those that a test interrupts would not end.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for plugin in (timeouts, remains):
        config.pluginmanager.register(plugin)


# -- nothing is left behind -------------------------------------------------------------------------------------------

# How many turns of the loop a cancelled task gets to unwind; one that nobody cancelled never ends by itself.
UNWINDING_TURNS: Final = 10

# Helpers that multiprocessing starts once and keeps for the life of the process, by their command lines.
PERMANENT_CHILDREN: Final = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def _children() -> set[psutil.Process]:
    """The child processes of this one, those that ended without anyone waiting for them included."""
    multiprocessing.active_children()  # called for its effect: it reaps multiprocessing's own that have ended
    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            command = " ".join(child.cmdline())
        except psutil.ZombieProcess:
            command = ""
        except psutil.NoSuchProcess:
            continue
        if not any(helper in command for helper in PERMANENT_CHILDREN):
            found.add(child)
    return found


@pytest.fixture
async def _task_watch() -> AsyncIterator[None]:
    yield
    for _ in range(UNWINDING_TURNS):
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if not left:
            return
        await asyncio.sleep(0)
    report = io.StringIO()
    for task in left:
        task.print_stack(file=report)
    pytest.fail(f"asyncio tasks left pending by the test:\n{report.getvalue()}", pytrace=False)


@pytest.fixture(autouse=True)
def no_task_left(request: pytest.FixtureRequest) -> None:
    """Fails an async test whose tasks outlive it and its fixtures; sync tests are spared a loop of their own."""
    if request.node.get_closest_marker("asyncio") is not None:
        request.getfixturevalue("_task_watch")


# After no_task_left, hence torn down while the test's loop is open: closing uvloop waits for the processes it started.
@pytest.fixture(autouse=True)
def no_child_left(no_task_left: None) -> Iterator[None]:
    """Fails a test that ends before its child processes do (those of wider fixtures are there before it starts)."""
    before = _children()
    yield
    left = _children() - before
    if not left:
        return
    texts = [str(child) for child in left]
    for child in left:  # they must not disturb the tests that follow; whoever started them reaps them
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    pytest.fail("child processes left behind by the test:\n" + "\n".join(texts), pytrace=False)
