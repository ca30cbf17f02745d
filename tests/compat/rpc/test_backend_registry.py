"""Backends by name, and their options."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch

from arpc.compat import rpc
from arpc.compat.rpc import backend_registry


def init_backend() -> None:
    """It is never asked to."""


def test_a_backend_is_registered_once() -> None:
    name = "OF_THIS_TEST"
    made = backend_registry.register_backend(name, rpc.RpcBackendOptions, init_backend)
    try:
        assert repr(made) == f"BackendType.{name}"
        assert backend_registry.backend_registered(name)
        with pytest.raises(RuntimeError, match=f"^RPC backend {name}: already registered$"):
            backend_registry.register_backend(name, rpc.RpcBackendOptions, init_backend)
        options = backend_registry.construct_rpc_backend_options(made, rpc_timeout=3)
        assert (options.rpc_timeout, options.init_method) == (3.0, "env://")
    finally:
        del backend_registry._backends[name]
        backend_registry.BackendType = backend_registry._make_backend_type()


def test_options_are_checked() -> None:
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        rpc.TensorPipeRpcBackendOptions(rpc_timeout=timedelta(seconds=1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        rpc.TensorPipeRpcBackendOptions(num_worker_threads=0)
    with pytest.raises(ValueError, match="list of CUDA devices"):
        rpc.TensorPipeRpcBackendOptions(devices=["cpu"])
    with pytest.raises(ValueError, match="1-to-1"):
        rpc.TensorPipeRpcBackendOptions(device_maps={"a": {0: 1, 1: 1}})
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=5, num_worker_threads=3)
    options.set_device_map("a", {"cpu": "cpu"})
    assert options.device_maps == {"a": {torch.device("cpu"): torch.device("cpu")}}
    made = options.as_arpc()
    assert (made.rpc_timeout, made.num_worker_threads, made.timeouts_travel) == (5.0, 3, False)


def test_init_rpc_refuses_what_makes_no_sense(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="Argument backend must be a member of BackendType"):
        rpc.init_rpc("a", backend="TENSORPIPE", rank=0, world_size=1)
    with pytest.raises(TypeError, match="must be an instance of RpcBackendOptions"):
        rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options={})
    with pytest.raises(TypeError, match="Could not infer backend for options"):
        rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions())
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/group")
    with pytest.raises(RuntimeError, match="Worker name must match"):
        rpc.init_rpc("a*", rank=0, world_size=1, rpc_backend_options=options)
    with pytest.raises(RuntimeError, match="Worker name must match"):
        rpc.WorkerInfo("", 0)


def test_there_is_one_worker_at_a_time(alone: str, tmp_path: Path) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/another")
    with pytest.raises(RuntimeError, match="RPC is already initialized"):
        rpc.init_rpc("second", rank=0, world_size=1, rpc_backend_options=options)
    assert [info.name for info in rpc._get_current_rpc_agent().get_worker_infos()] == [alone]


def test_figures_have_the_names_of_torch(alone: str) -> None:
    found = rpc._get_debug_info()
    assert found["agent.thread_pool_size"] == "4"
    assert found["num_owner_rrefs"] == "0"
    assert "agent.gil_average_wait_time_us" not in found
    rpc.enable_gil_profiling(True)
    assert float(rpc._get_debug_info()["agent.gil_average_wait_time_us"]) >= 0


def test_the_default_timeout_can_be_changed(alone: str) -> None:
    assert rpc.get_rpc_timeout() == 60
    rpc._set_rpc_timeout(7)
    assert rpc.get_rpc_timeout() == 7
