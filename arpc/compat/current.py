"""The agent of this process. As in torch, there is one at a time, shared by all threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from threading import get_ident
from typing import Any

from arpc.private.asyncio import running_loop

__all__ = ["get_agent", "has_agent", "reset_agent", "set_agent", "starting"]

_agents: list[Any] = []
_starts: list[tuple[int, threading.Event]] = []

_NO_AGENT = "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Mark an agent as being started by this thread. Peers may call it before that is over: handlers then wait."""
    start = (get_ident(), threading.Event())
    _starts.append(start)
    try:
        yield
    finally:
        _starts.remove(start)
        start[1].set()


def has_agent() -> bool:
    """Whether there is an agent. Waits for a start that is in progress in another thread."""
    if not _agents and running_loop() is None:
        for starter, is_over in tuple(_starts):
            if starter != get_ident():
                is_over.wait()
    return bool(_agents)


def get_agent() -> Any:
    """Return the agent. Raises RuntimeError if there is none."""
    if not _agents and not has_agent():
        raise RuntimeError(_NO_AGENT)
    return _agents[0]


def set_agent(agent: Any) -> None:
    """Make this the agent of the process."""
    _agents[:] = [agent]


def reset_agent() -> None:
    """Remove the agent of the process."""
    _agents.clear()
