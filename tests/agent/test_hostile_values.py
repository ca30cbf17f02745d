"""Whatever a handler returns or is passed fails its own call at most, and no other: see `tests.hostile_trial`."""

from __future__ import annotations

import pytest

from tests.hostile import VALUE_HOOKS, VALUES
from tests.hostile_handlers import RETURNING, TAKING
from tests.hostile_trial import finalizers_may_raise, specimens, trial  # noqa: F401 - a fixture for all tests


@pytest.mark.parametrize("names", specimens(VALUES, VALUE_HOOKS))
async def test_whatever_a_handler_returns_arrives_or_fails_that_call_alone(names, caplog):
    async with trial(caplog) as tried:
        await tried.run(RETURNING, "worker1", names, must_raise=False)


@pytest.mark.parametrize("names", specimens(VALUES, VALUE_HOOKS))
async def test_whatever_is_passed_arrives_or_fails_that_call_alone(names, caplog):
    """What pickling an argument raises is raised to the code that makes the call, on its own worker, as it is."""
    async with trial(caplog) as tried:
        await tried.run(TAKING, "worker1", names, must_raise=False, may_be_any=True)
