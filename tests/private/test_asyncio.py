from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from arpc.private import asyncio as private


@pytest.mark.private_apis
def test_private_apis_are_on():
    # or handlers cost a task each, and answers a turn of the loop: a Python that has them no more must be seen here
    assert private.private_apis() == {"enter_task": True, "running_loop": True}


def test_an_environment_variable_turns_them_off():
    program = "from arpc.private.asyncio import private_apis; print(*private_apis().values())"
    environment = {**os.environ, "ARPC_PUBLIC_APIS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60, env=environment
    )
    assert set(done.stdout.split()) == {"False"}


@pytest.mark.parametrize("running_loop", [private.running_loop, private.find_running_loop])
async def test_the_running_loop_is_found(running_loop):
    assert running_loop() is asyncio.get_running_loop()
    assert await asyncio.to_thread(running_loop) is None
