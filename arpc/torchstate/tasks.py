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

    The task starts from a copy of its creator's state. ``kwargs`` are those of :class:`asyncio.Task`, whichever of them
    the running version of Python passes on (``name``, ``context``, ``eager_start``).
    """
    return asyncio.Task(_isolate_if_coroutine(coro), loop=loop, **_without_unset(kwargs))


def rooted_task_factory(loop: asyncio.AbstractEventLoop, coro: _CoroutineLike[T], **kwargs: Any) -> asyncio.Task[T]:
    """A task factory like `task_factory`, for a loop that runs on a `pristine_thread`: it costs less there."""
    if not isinstance(coro, Coroutine) or isinstance(coro, Isolated) or kwargs.get("eager_start"):
        return task_factory(loop, coro, **kwargs)
    return asyncio.Task(Rooted(_in_steps(coro), capture()), loop=loop, **_without_unset(kwargs))


@contextlib.contextmanager
def pristine_thread() -> Iterator[None]:
    """Take the thread's state away for the time of a block, in which a loop may run with `rooted_task_factory`."""
    outer = save_and_reset()
    try:
        yield
    finally:
        save_and_reset()
        restore(outer)


class _ChainedTaskFactory:
    """Isolates the coroutine, then lets the factory that was there before make the task."""

    def __init__(self, previous: Callable[..., asyncio.Future[Any]]) -> None:
        self._previous = previous

    def __call__(self, loop: asyncio.AbstractEventLoop, coro: _CoroutineLike[T], **kwargs: Any) -> asyncio.Future[T]:
        return self._previous(loop, _isolate_if_coroutine(coro), **_without_unset(kwargs))


_FACTORIES: Final = (task_factory, rooted_task_factory)


def install_task_factory(loop: asyncio.AbstractEventLoop | None = None) -> None:
    """Isolate every task that ``loop`` (by default the running one) creates from now on.

    A factory that is there already keeps making the tasks, an eager one for instance. A second call changes nothing.
    The task that calls this exists already, so it is not isolated: install before ``run_until_complete``, as
    ``arpc.run`` does, to have it so.
    """
    loop = asyncio.get_running_loop() if loop is None else loop
    previous: Any = loop.get_task_factory()
    if previous is None:
        loop.set_task_factory(task_factory)
    elif previous not in _FACTORIES and not isinstance(previous, _ChainedTaskFactory):
        loop.set_task_factory(_ChainedTaskFactory(previous))


def isolates_all_tasks(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether every task of ``loop`` is isolated, those that exist and those to come.

    Between steps its thread is pristine.
    """
    factory: Any = loop.get_task_factory()
    if factory not in _FACTORIES and not isinstance(factory, _ChainedTaskFactory):
        return False
    return all(isinstance(task.get_coro(), Isolated) for task in asyncio.all_tasks(loop))


def _without_unset(kwargs: dict[str, Any]) -> dict[str, Any]:
    # A loop may name keywords that this Python's Task, or the other factory, does not know. None says they are unset.
    return {name: value for name, value in kwargs.items() if value is not None}


def _isolate_if_coroutine(coro: _CoroutineLike[T]) -> _CoroutineLike[T]:
    # What is no coroutine goes on as it is, for asyncio to refuse in its own words.
    return isolate(_in_steps(coro), inherit=True) if asyncio.iscoroutine(coro) else coro


def _in_steps(coro: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
    """What the work that creates a task has around its steps, the task has around its own."""
    steps = current_steps.get()
    return coro if steps is None or isinstance(coro, Isolated) else Stepped(coro, steps)
