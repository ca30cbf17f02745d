"""What a test leaves behind is its own error, and is gone when the next one starts.

However a test has failed, and its teardown with it, all of its fixtures are torn down, no worker stays the current one
and no thread goes on. `tests/conftest.py` registers these hooks.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Generator
from typing import Any, Final

import pytest

from arpc.agent.scope import current_scope

# How long a thread may take to end that has nothing to do any more. A bound, and far from what it takes.
THREAD_END_S: Final = 30.0

_threads_before: Final = pytest.StashKey[set[threading.Thread]]()
_exit_code: Final = pytest.StashKey[int]()


# -- all fixtures are torn down


def pytest_configure(config: pytest.Config) -> None:
    """Let pytest go on with the next fixture when one ends with what is no ordinary error, such as a cancellation.

    It would leave out the rest of them, and hand what they made, the closed event loop as well, to the next test.
    """
    patch = pytest.MonkeyPatch()
    finish = pytest.FixtureDef.finish

    def finish_with_an_ordinary_error(self: pytest.FixtureDef[Any], request: Any) -> None:
        try:
            finish(self, request)
        except (Exception, pytest.fail.Exception, pytest.skip.Exception, pytest.exit.Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise pytest.fail.Exception(f"the end of fixture {self.argname!r} raised {error!r}") from error

    patch.setattr(pytest.FixtureDef, "finish", finish_with_an_ordinary_error)
    config.add_cleanup(patch.undo)


# -- no thread goes on, no worker stays


@pytest.fixture(autouse=True)
def no_thread_left(request: pytest.FixtureRequest) -> None:
    """Takes down which threads there are, those of wider fixtures included; `pytest_runtest_teardown` looks again."""
    request.node.stash[_threads_before] = set(threading.enumerate())


# Around all others, and so after them: the threads of the loop's executor end when the loop is closed.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    try:
        result = yield
    except BaseException as error:
        current_scope.set(None)  # pytest-asyncio leaves what an async fixture has set if the end of that fails
        for text in _find_threads_left(item):
            error.add_note(text)
        raise
    left = _find_threads_left(item)
    if (scope := current_scope.get()) is not None:
        current_scope.set(None)
        left.append(f"{scope.worker}, as the current worker")
    if left:
        pytest.fail("left behind by the test:\n" + "\n".join(left), pytrace=False)
    return result


def _find_threads_left(item: pytest.Item) -> list[str]:
    """What they are and where they are at, once those that are about to end have ended."""
    before = item.stash.get(_threads_before, None)
    if before is None:
        return []  # it has not come so far as to start any
    left = [
        thread
        for thread in threading.enumerate()
        # not those that torch has started, and that have once run Python
        if thread not in before and not isinstance(thread, threading._DummyThread)
    ]
    _join(left, min(1.0, THREAD_END_S))
    if any(thread.is_alive() for thread in left):
        gc.collect()  # with a worker that nobody has shut down its threads end when it is collected
        _join(left, THREAD_END_S)
    return [_describe(thread) for thread in left if thread.is_alive()]


def _join(threads: list[threading.Thread], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _describe(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return f"{thread}\n" + "".join(traceback.format_stack(frame) if frame is not None else ())


# -- the run ends


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_exit_code] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """A thread that goes on is told of above, and would keep this process for ever: it ends all the same."""
    here = threading.current_thread()
    left = [thread for thread in threading.enumerate() if not thread.daemon and thread is not here]
    if left and _exit_code in config.stash:
        sys.stderr.write("the run ends without its threads:\n" + "".join(map(_describe, left)))
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(config.stash[_exit_code])
