"""Two workers on which every way of calling a handler is tried with a specimen of `tests.hostile`.

Each call ends once, the caller learns what happened, both workers answer the next call, nothing is left of it in any
table, and neither a log nor the loop has anything to complain of.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

import arpc
from arpc.agent.hooks import context_propagation as variables
from arpc.testing import Cluster, cluster
from arpc.user_errors import cause_of, stack_of, type_name_of
from tests.agent.leftovers import assert_both_alive, assert_nothing_left, warm_up
from tests.hostile import EXCEPTIONS, HOOK_REASONS, REASONS
from tests.hostile_handlers import Way, variable

OPTIONS = arpc.RpcOptions(gc_freeze=False, rref_grace=0.2, control_backoff=0.02)
CALL_LIMIT_S = 20
LEFT_LIMIT_S = 30
WRONG = (arpc.WorkerLostError, arpc.RpcTimeoutError)
"""What a call must not end with because of a specimen."""
WITHOUT_CALLER = "a generator raised when it was stopped"
"""The one error that is logged, as there is nobody to be told."""


def specimens(names: Iterable[str], hooks: tuple[str, ...]) -> list[Any]:
    """Those of one hook are tested together: a group of workers for each would take longer than all the rest."""
    of_hooks = {hook: tuple(f"{hook}-{reason}" for reason in HOOK_REASONS) for hook in hooks}
    hooked = {name for group in of_hooks.values() for name in group}
    others = {name: (name,) for name in names if name not in hooked}
    return [pytest.param(group, id=name) for name, group in (of_hooks | others).items()]


@pytest.fixture(autouse=True)
def finalizers_may_raise(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a finalizer raises is reported by the interpreter, and harms nobody; pytest would keep the specimen.

    So is a garbage collection that begins at the limit of recursion, where its callbacks cannot be called.
    """
    has_finalizer = "__del__" in request.node.name
    report = sys.unraisablehook

    def report_others(unraisable: Any) -> None:
        if not (has_finalizer or isinstance(unraisable.exc_value, RecursionError)):
            report(unraisable)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", report_others)
        yield
        if has_finalizer:
            gc.collect()


class Trial:
    """Two workers, and the list of all that went wrong with them, as texts: pytest must not look at a specimen."""

    def __init__(self, group: Cluster) -> None:
        self.group = group
        self.complaints: list[str] = []

    async def run(
        self, ways: Mapping[str, Way], to: str, names: Sequence[str], *, must_raise: bool, may_be_any: bool = False
    ) -> None:
        """Call a handler every way, each with another one of the variants of a specimen, in turns.

        ``may_be_any``: what is raised need not be an Exception.
        """
        for number, (way, call) in enumerate(ways.items()):
            name = names[(number + sum(map(ord, names[0]))) % len(names)]
            try:
                complaint = await self._outcome(call, to, name, must_raise, may_be_any)
                if not complaint and await self.group[0].rpc_sync(to, answer, timeout=CALL_LIMIT_S) != "answer":
                    complaint = "the next call was not answered"
            except Exception as error:  # noqa: BLE001 - told below
                complaint = f"the next call failed: {stack_of(error)}"
            if complaint:
                self.complaints.append(f"{name} by {way}: {complaint}")

    async def _outcome(self, call: Way, to: str, name: str, must_raise: bool, may_be_any: bool) -> str:
        task = asyncio.ensure_future(_caught(call(self.group[0], to, name)))
        await asyncio.wait([task], timeout=CALL_LIMIT_S)
        if not task.done():
            task.cancel()
            return "it hangs"
        if task.cancelled():
            return "it cancelled its caller"
        (error,) = task.result()
        if error is None:
            return "it did not raise" if must_raise else ""
        told = told_by(error)
        if not (may_be_any or issubclass(type(error), Exception)) or issubclass(type(error), WRONG):
            return told
        expected = type_name_of(EXCEPTIONS[name]()) if must_raise else ""
        is_told = any(text in told for text in (expected, *REASONS, "cancelled"))
        return "" if is_told else f"it does not say what it was: {told}"


async def _caught(call: Awaitable[Any]) -> tuple[BaseException | None]:
    """What a call raised, in a tuple: a task that ends with SystemExit ends the loop."""
    try:
        await call
    except asyncio.CancelledError as error:
        if asyncio.current_task().cancelling():
            raise
        return (error,)
    except BaseException as error:  # noqa: BLE001 - it is what is asked for
        return (error,)
    return (None,)


def told_by(error: BaseException) -> str:
    """All that a caller can read in an error."""
    cause = cause_of(error)
    return f"{type_name_of(error)} {stack_of(error)} {stack_of(cause) if cause is not None else ''}"


@asynccontextmanager
async def trial(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Trial]:
    complaints: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(describe_context(context)))
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(variables, "_declared", {variable.name: variable})
        group = await stack.enter_async_context(cluster(2, options=OPTIONS))
        await warm_up(group)
        made = Trial(group)
        yield made
        complaints += made.complaints
        if not complaints:
            await assert_both_alive(group)
            await assert_nothing_left(group)
            await assert_no_rref_left(group)
    for record in caplog.records:
        if record.levelno >= logging.ERROR and not record.getMessage().startswith(WITHOUT_CALLER):
            complaints.append(record.getMessage())
    if complaints:
        pytest.fail("\n\n".join(complaints), pytrace=False)


def describe_context(context: Mapping[str, Any]) -> str:
    error = context.get("exception")
    return f"{context['message']}: {stack_of(error) if error is not None else ''}"


async def assert_no_rref_left(group: Cluster) -> None:
    def left() -> list[Any]:
        owned = [(worker.name, len(worker.rref_context.forks.owned)) for worker in group]
        return [(name, count) for name, count in owned if count]

    async with asyncio.timeout(LEFT_LIMIT_S):
        while left():
            gc.collect()  # which takes long in a process that has run many tests
            await asyncio.sleep(0.02)


async def answer() -> str:
    return "answer"
