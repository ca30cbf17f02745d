from __future__ import annotations

import pytest

from arpc.private import asyncio as private

pytestmark = pytest.mark.skipif(private.PUBLIC_ONLY, reason="the private APIs are turned off")


def test_private_apis_are_on():
    # or handlers cost a task each, and answers a turn of the loop: a Python that has them no more must be seen here
    assert private.private_apis() == {"enter_task": True, "future_blocking": True, "running_loop": True}
