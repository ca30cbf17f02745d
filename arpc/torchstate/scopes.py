"""``no_grad()`` and its siblings for coroutines: blocks whose effect follows the coroutine across ``await``.

As a decorator of an ``async def`` (or an async generator) a scope isolates each call, which is exact in any task.

As a ``with`` or ``async with`` block a scope relies on the driver of the coroutine to swap torch's state: the runtime
does so for handlers, the task factory for tasks. In a task that is not isolated the block is still right as long as
nothing in it awaits. If something does, the task is interrupted at that very await, as :func:`asyncio.timeout` would,
and the block raises :class:`TorchStateError`. In code outside of any task, a block is the same as torch's own.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar, cast, overload
from weakref import WeakSet

import torch

from arpc.errors import TorchStateError
from arpc.torchstate.isolated import Isolated, is_isolated
from arpc.torchstate.state import SavedState, capture, restore, save_and_reset

__all__ = ["GradScope", "enable_grad", "inference_mode", "no_grad", "set_grad_enabled"]

F = TypeVar("F", bound=Callable[..., Any])


class GradScope:
    """A grad-mode block or decorator; made by :func:`no_grad` and its siblings.

    A scope may be entered again once it was left, but not twice at a time: concurrent coroutines each make their own.
    """

    __slots__ = ("_block", "_name", "_open_block", "_watch")

    def __init__(self, name: str, open_block: Callable[[], AbstractContextManager[Any]]) -> None:
        self._name = name
        self._open_block = open_block
        self._block: AbstractContextManager[Any] | None = None
        self._watch: _LeakWatch | None = None

    def __enter__(self) -> None:
        if self._block is not None:
            raise TorchStateError(f"this {self._name} scope is already entered; make a new one for each block")
        self._watch = _watch_current_task(self._name)
        self._block = self._open_block()
        self._block.__enter__()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        block, self._block = self._block, None
        watch, self._watch = self._watch, None
        if block is not None:
            block.__exit__(exc_type, exc, traceback)
        if watch is not None:
            watch.finish(exc)

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(exc_type, exc, traceback)

    def __call__(self, func: F) -> F:
        """Decorate ``func``: a function, a generator, a coroutine function or an async generator function."""
        if inspect.iscoroutinefunction(func):

            @functools.wraps(func)
            async def coroutine_function(*args: Any, **kwargs: Any) -> Any:
                return await Isolated(func(*args, **kwargs), self._capture_inside())

            return cast("F", coroutine_function)
        if inspect.isasyncgenfunction(func):
            return cast("F", self._decorate_async_generator(func))
        # Torch's own decorators are right for all others, generators included: these cannot await in between.
        return cast("F", self._open_block()(func))  # type: ignore[operator]

    def _capture_inside(self) -> SavedState:
        with self._open_block():
            return capture()

    def _decorate_async_generator(
        self, func: Callable[..., AsyncGenerator[Any, Any]]
    ) -> Callable[..., AsyncGenerator[Any, Any]]:
        @functools.wraps(func)
        async def generator_function(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            generator = func(*args, **kwargs)
            state = self._capture_inside()
            resume = generator.__anext__()
            try:
                while True:
                    step = Isolated(resume, state)
                    try:
                        item = await step
                    except StopAsyncIteration:
                        return
                    finally:
                        state = step.state
                    try:
                        sent = yield item
                    except GeneratorExit:
                        raise
                    except BaseException as exc:  # noqa: BLE001 - thrown in by the consumer, so meant for the generator
                        resume = generator.athrow(exc)
                    else:
                        resume = generator.asend(sent)
            finally:
                await Isolated(generator.aclose(), state)

        return generator_function


@overload
def no_grad() -> GradScope: ...
@overload
def no_grad(func: F, /) -> F: ...
def no_grad(func: F | None = None, /) -> GradScope | F:
    """Compute without recording gradients, as :class:`torch.no_grad` does, in this coroutine and no other."""
    scope = GradScope("no_grad()", torch.no_grad)
    return scope if func is None else scope(func)


@overload
def enable_grad() -> GradScope: ...
@overload
def enable_grad(func: F, /) -> F: ...
def enable_grad(func: F | None = None, /) -> GradScope | F:
    """Record gradients inside a :func:`no_grad` block, as :class:`torch.enable_grad` does, in this coroutine only."""
    scope = GradScope("enable_grad()", torch.enable_grad)
    return scope if func is None else scope(func)


def set_grad_enabled(mode: bool) -> GradScope:
    """Switch the recording of gradients on or off for a block or a decorated function, in this coroutine only.

    Unlike torch's, the mere call changes nothing: a scope has a beginning and an end.
    """
    return GradScope(f"set_grad_enabled({mode})", torch.enable_grad if mode else torch.no_grad)


@overload
def inference_mode(mode: bool = True) -> GradScope: ...
@overload
def inference_mode(mode: F, /) -> F: ...
def inference_mode(mode: bool | F = True) -> GradScope | F:
    """Compute in inference mode, as :class:`torch.inference_mode` does, in this coroutine and no other."""
    if not isinstance(mode, bool):
        return inference_mode(True)(mode)
    return GradScope(f"inference_mode({mode})", functools.partial(torch.inference_mode, mode))


class _LeakWatch:
    """Detects an ``await`` inside a scope, in a task whose torch state is not swapped at its steps.

    A callback is scheduled when the scope is entered and cancelled when it is left. The loop runs callbacks in order:
    if it runs this one, the task is suspended inside the scope, and its next step can only be scheduled later.
    """

    __slots__ = ("_base", "_cancel_requests", "_handle", "_leaked", "_name", "_task")

    def __init__(self, name: str, task: asyncio.Task[Any]) -> None:
        self._name = name
        self._task = task
        self._base = capture()
        self._cancel_requests = task.cancelling()
        self._leaked = False
        self._handle = task.get_loop().call_soon(self._on_suspended)
        _watched_tasks.add(task)

    def _on_suspended(self) -> None:
        self._leaked = True
        save_and_reset()
        restore(self._base)
        self._task.cancel(f"await inside arpc {self._name}")

    def finish(self, exc: BaseException | None) -> None:
        _watched_tasks.discard(self._task)
        self._handle.cancel()
        if not self._leaked:
            return
        others_cancel = self._task.uncancel() > self._cancel_requests
        if others_cancel and isinstance(exc, asyncio.CancelledError):
            return
        raise TorchStateError(
            f"task {self._task.get_name()!r} awaited inside {self._name}, but nothing keeps torch's state per coroutine"
            " in this task, so other tasks on this thread would have run in that mode too. Start the program with"
            " arpc.run(main), or call arpc.torchstate.install_task_factory(loop) before this task is created, or move"
            f" the block into a coroutine function decorated with @arpc.{self._name}"
        ) from exc


_watched_tasks: WeakSet[asyncio.Task[Any]] = WeakSet()


def _watch_current_task(name: str) -> _LeakWatch | None:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return None
    # Of nested scopes the outermost watches: only it has the state that the thread must return to.
    if task is None or task in _watched_tasks or is_isolated():
        return None
    return _LeakWatch(name, task)
