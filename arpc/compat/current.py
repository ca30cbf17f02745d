"""The agent of this process. In torch's world there is one at a time, which every thread finds."""

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
    """An agent is being started by this thread. Others may call it before the start is over, and handlers wait."""
    start = (get_ident(), threading.Event())
    _starts.append(start)
    try:
        yield
    finally:
        _starts.remove(start)
        start[1].set()


def has_agent() -> bool:
    """Whether there is one, after a start that is under way in another thread."""
    if not _agents and running_loop() is None:
        for starter, is_over in tuple(_starts):
            if starter != get_ident():
                is_over.wait()
    return bool(_agents)


def get_agent() -> Any:
    """The agent. Raises RuntimeError if there is none."""
    if not _agents and not has_agent():
        raise RuntimeError(_NO_AGENT)
    return _agents[0]


def set_agent(agent: Any) -> None:
    """Let it be the one that threads find."""
    _agents[:] = [agent]


def reset_agent() -> None:
    """Let there be none."""
    _agents.clear()
