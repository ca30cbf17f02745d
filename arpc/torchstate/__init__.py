"""Torch's thread-local state, kept per coroutine instead of per thread.

Grad mode, inference mode, autocast, function and dispatch modes (``torch.device`` is one) and saved-tensor hooks
belong to the thread. Many coroutines share one thread, so ``with torch.no_grad(): await x`` affects all code that the
loop runs meanwhile, and two such blocks that overlap leave grad mode off for good. Here each coroutine gets its own
state:

- :mod:`~arpc.torchstate.state`: read, take away and put back a thread's state;
- :mod:`~arpc.torchstate.isolated`: :class:`Isolated`, a coroutine whose every step runs in its own state;
- :mod:`~arpc.torchstate.tasks`: the asyncio task factory that isolates every task of a loop;
- :mod:`~arpc.torchstate.steps`: hooks around each step of a coroutine, its tasks and its threads;
- :mod:`~arpc.torchstate.threads`: use a state in a worker thread, and leave the thread clean;
- :mod:`~arpc.torchstate.scopes`: ``no_grad()`` and its siblings, for ``with``, ``async with`` and as decorators.
"""

from arpc.torchstate.isolated import Isolated, Rooted, is_isolated, isolate, isolating_driver
from arpc.torchstate.scopes import GradScope, enable_grad, inference_mode, no_grad, set_grad_enabled
from arpc.torchstate.state import DEFAULTS, SavedState, capture, is_pristine, restore, save_and_reset
from arpc.torchstate.steps import AllSteps, Stepped, Steps, call_stepped, current_steps, step_result
from arpc.torchstate.tasks import (
    install_task_factory,
    isolates_all_tasks,
    pristine_thread,
    rooted_task_factory,
    task_factory,
)
from arpc.torchstate.threads import call_isolated, run_with, to_thread

__all__ = [
    "DEFAULTS",
    "AllSteps",
    "GradScope",
    "Isolated",
    "Rooted",
    "SavedState",
    "Stepped",
    "Steps",
    "call_isolated",
    "call_stepped",
    "capture",
    "current_steps",
    "enable_grad",
    "inference_mode",
    "install_task_factory",
    "is_isolated",
    "is_pristine",
    "isolate",
    "isolates_all_tasks",
    "isolating_driver",
    "no_grad",
    "pristine_thread",
    "restore",
    "rooted_task_factory",
    "run_with",
    "save_and_reset",
    "set_grad_enabled",
    "step_result",
    "task_factory",
    "to_thread",
]
