"""The agent of this process. In torch's world there is one at a time, which every thread finds."""

from __future__ import annotations

from typing import Any

__all__ = ["get_agent", "has_agent", "reset_agent", "set_agent"]

_agents: list[Any] = []

_NO_AGENT = (
    "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"
)


def get_agent() -> Any:
    """The agent. Raises RuntimeError if there is none."""
    if not _agents:
        raise RuntimeError(_NO_AGENT)
    return _agents[0]


def has_agent() -> bool:
    return bool(_agents)


def set_agent(agent: Any) -> None:
    _agents[:] = [agent]


def reset_agent() -> None:
    _agents.clear()
