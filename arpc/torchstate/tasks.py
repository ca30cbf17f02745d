"""The asyncio task factory that gives every task of a loop its own torch state."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import Any, Final, TypeAlias, TypeVar

from arpc.torchstate.isolated import Isolated, Rooted, isolate
from arpc.torchstate.state import capture, restore, save_and_reset
from arpc.torchstate.steps import Stepped, current_steps

__all__ = ["install_task_factory", "isolates_all_tasks", "pristine_thread", "rooted_task_factory", "task_factory"]

T = TypeVar("T")

_CoroutineLike: TypeAlias = Coroutine[Any, Any, T] | Generator[Any, None, T]


def task_factory(loop: asyncio.AbstractEventLoop, coro: _CoroutineLike[T], **kwargs: Any) -> asyncio.Task[T]:
    """Create a task whose torch state follows it: for ``loop.set_task_factory(task_factory)``.

    The task starts from a copy of its creator's state. ``kwargs`` are those arguments of :class:`asyncio.Task` that the
    running version of Python passes on (``name``, ``context``, ``eager_start``).
    """
    return asyncio.Task(_isolate_if_coroutine(coro), loop=loop, **_without_unset(kwargs))


def rooted_task_factory(loop: asyncio.AbstractEventLoop, coro: _CoroutineLike[T], **kwargs: Any) -> asyncio.Task[T]:
    """Create a task as `task_factory` does, at less cost, for a loop that runs on a `pristine_thread`."""
    if not isinstance(coro, Coroutine) or isinstance(coro, Isolated) or kwargs.get("eager_start"):
        return task_factory(loop, coro, **kwargs)
    return asyncio.Task(Rooted(_in_steps(coro), capture()), loop=loop, **_without_unset(kwargs))


@contextlib.contextmanager
def pristine_thread() -> Iterator[None]:
    """Set the thread's state aside during a block, in which a loop may run with `rooted_task_factory`."""
    outer = save_and_reset()
    try:
        yield
    finally:
        save_and_reset()
        restore(outer)


class _ChainedTaskFactory:
    """Isolates the coroutine, then lets the loop's previous factory make the task."""

    def __init__(self, previous: Callable[..., asyncio.Future[Any]]) -> None:
        self._previous = previous

    def __call__(self, loop: asyncio.AbstractEventLoop, coro: _CoroutineLike[T], **kwargs: Any) -> asyncio.Future[T]:
        return self._previous(loop, _isolate_if_coroutine(coro), **_without_unset(kwargs))


_FACTORIES: Final = (task_factory, rooted_task_factory)


def install_task_factory(loop: asyncio.AbstractEventLoop | None = None) -> None:
    """Isolate every task that ``loop`` (by default the running one) creates from now on.

    If the loop has a factory already, an eager one for instance, that still makes the tasks. A second call changes
    nothing. The task that calls this exists already, so it is not isolated: to isolate the main task as well, install
    before ``run_until_complete``, as ``arpc.run`` does.
    """
    loop = asyncio.get_running_loop() if loop is None else loop
    previous: Any = loop.get_task_factory()
    if previous is None:
        loop.set_task_factory(task_factory)
    elif previous not in _FACTORIES and not isinstance(previous, _ChainedTaskFactory):
        loop.set_task_factory(_ChainedTaskFactory(previous))


def isolates_all_tasks(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether every task of ``loop`` is isolated, those that exist and future ones.

    Then the thread of the loop is pristine between steps, if it was when the loop started.
    """
    factory: Any = loop.get_task_factory()
    if factory not in _FACTORIES and not isinstance(factory, _ChainedTaskFactory):
        return False
    return all(isinstance(task.get_coro(), Isolated) for task in asyncio.all_tasks(loop))


def _without_unset(kwargs: dict[str, Any]) -> dict[str, Any]:
    # A loop may pass keywords that this Python's Task, or the other factory, does not accept. None means unset.
    return {name: value for name, value in kwargs.items() if value is not None}


def _isolate_if_coroutine(coro: _CoroutineLike[T]) -> _CoroutineLike[T]:
    # An object that is no coroutine is passed on unchanged, so that asyncio raises its own error.
    return isolate(_in_steps(coro), inherit=True) if asyncio.iscoroutine(coro) else coro


def _in_steps(coro: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
    """Wrap the coroutine of a task in the `Steps` of the work that creates the task."""
    steps = current_steps.get()
    return coro if steps is None or isinstance(coro, Isolated) else Stepped(coro, steps)
