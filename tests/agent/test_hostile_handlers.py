"""Whatever a handler raises fails the call that it is part of, and no other: see `tests.hostile_trial`."""

from __future__ import annotations

import sys

import pytest

import arpc
from arpc.testing import cluster
from tests.hostile import EXCEPTIONS, HOOKS
from tests.hostile_handlers import RAISING
from tests.hostile_trial import OPTIONS, finalizers_may_raise, specimens, trial  # noqa: F401 - a fixture for all


# Since Python 3.13 C code that asks for an attribute reports what the attribute raises
@pytest.mark.filterwarnings("ignore:Exception ignored in PyObject_HasAttr:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("names", specimens(EXCEPTIONS, HOOKS))
async def test_whatever_a_handler_raises_fails_that_call_alone(names, caplog):
    async with trial(caplog) as tried:
        await tried.run(RAISING, "worker1", names, must_raise=True)


@pytest.mark.parametrize(
    "names", specimens(("SystemExit", "StopIteration", "lying class"), ("__reduce__", "__class__"))
)
async def test_a_worker_that_calls_itself_survives_what_its_handlers_raise(names, caplog):
    async with trial(caplog) as tried:
        await tried.run(RAISING, "worker0", names, must_raise=True)


async def exit_process() -> None:
    sys.exit("by mistake")


async def test_the_caller_is_told_what_it_was():
    async with cluster(2, options=OPTIONS) as group:
        with pytest.raises(arpc.RemoteError, match="SystemExit on worker 'worker1': by mistake"):
            await group[0].rpc_sync("worker1", exit_process)
