"""A drop-in that is alone in its group and calls itself: the whole API, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from arpc.compat import rpc


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[str]:
    """The name of the worker of this process, the only one of its group."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/group", num_worker_threads=4)
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    yield "alone"
    if rpc._is_current_rpc_agent_set():
        rpc.shutdown()
