"""A backend whose messages are lost or late on purpose, as in torch's tests."""

from __future__ import annotations

from typing import Any

from arpc.compat.agents import TensorPipeAgent
from arpc.compat.faults import MESSAGE_NAMES, Faults
from arpc.compat.rpc.backend_registry import register_backend, start_agent
from arpc.compat.rpc.constants import DEFAULT_NUM_WORKER_THREADS
from arpc.compat.rpc.options import TensorPipeRpcBackendOptions

__all__ = ["FaultyTensorPipeAgent", "FaultyTensorPipeRpcBackendOptions", "is_available"]


def is_available() -> bool:
    """Return True: arpc always has it."""
    return True


class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    """The options: which messages fail the first times that they are sent, and which are sent late."""

    def __init__(
        self,
        *,
        num_worker_threads: int,
        rpc_timeout: float,
        init_method: str,
        messages_to_fail: list[str],
        messages_to_delay: dict[str, float],
        num_fail_sends: int = 0,
    ) -> None:
        super().__init__(num_worker_threads=num_worker_threads, rpc_timeout=rpc_timeout, init_method=init_method)
        unknown = {*messages_to_fail, *messages_to_delay} - MESSAGE_NAMES
        if unknown:
            raise ValueError(f"no such messages: {', '.join(sorted(unknown))}")
        self.messages_to_fail = messages_to_fail
        self.messages_to_delay = messages_to_delay
        self.num_fail_sends = num_fail_sends


class FaultyTensorPipeAgent(TensorPipeAgent):
    """An agent that loses messages on purpose."""


def _construct(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
    messages_to_fail: list[str] | None = None,
    messages_to_delay: dict[str, float] | None = None,
    num_fail_sends: int = 0,
    **_: Any,
) -> FaultyTensorPipeRpcBackendOptions:
    return FaultyTensorPipeRpcBackendOptions(
        num_worker_threads=num_worker_threads,
        rpc_timeout=rpc_timeout,
        init_method=init_method,
        messages_to_fail=messages_to_fail or [],
        messages_to_delay=messages_to_delay or {},
        num_fail_sends=num_fail_sends,
    )


def _init(store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any) -> TensorPipeAgent:
    options = rpc_backend_options
    if not isinstance(options, FaultyTensorPipeRpcBackendOptions):
        raise TypeError(f"`rpc_backend_options` must be a `FaultyTensorPipeRpcBackendOptions`. {options}")
    agent = start_agent(store, name, rank, world_size, options, FaultyTensorPipeAgent)
    inner = agent.drop_in.agent
    agent.drop_in.thread.call(
        lambda: Faults(inner, options.messages_to_fail, options.messages_to_delay, options.num_fail_sends)
    )
    return agent


register_backend("FAULTY_TENSORPIPE", _construct, _init)
