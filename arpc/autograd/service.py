"""Distributed autograd of one worker, as the agent meets it: an interceptor, handlers, and an ear for lost workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import Context
from typing import Any

from torch import Tensor

from arpc.agent.agent import Agent
from arpc.autograd.context import Container
from arpc.autograd.lifetime import Lifetimes
from arpc.autograd.recording import Recorder
from arpc.ids import WorkerInfo
from arpc.options import RpcOptions
from arpc.wire.messages import AutogradQuery, AutogradRelease, Message

__all__ = ["AutogradService"]


class AutogradService:
    """The contexts of one worker, what is recorded in them, and the passes over them."""

    def __init__(self, options: RpcOptions, context: Context) -> None:
        self.container = Container()
        self.recorder = Recorder(self.container)
        self.lifetimes = Lifetimes(self.container, options, context)

    @property
    def handlers(self) -> Mapping[type[Message], Callable[..., Any]]:
        return {
            AutogradRelease: self.lifetimes.on_release,
            AutogradQuery: self.lifetimes.on_query,
        }

    def attach(self, agent: Agent) -> None:
        """The agent that messages go through. It was made with this service's handlers, so it comes later."""
        self.lifetimes.agent = agent

    def identify(self, info: WorkerInfo) -> None:
        """The group has given this worker its id."""
        self.container.worker_id = info.id

    # -- told by the agent

    def peer_connected(self, peer: WorkerInfo) -> None:
        self.lifetimes.peer_connected(peer)

    def peer_disconnected(self, peer: WorkerInfo, *, has_left: bool) -> None:
        self.lifetimes.peer_disconnected(peer, has_left=has_left)

    # -- for people

    def gradients(self, context_id: int) -> dict[Tensor, Tensor]:
        """What has been accumulated on this worker in a context."""
        return dict(self.container.find(context_id).gradients)

    def close(self) -> None:
        """Take part in nothing any more."""
        self.lifetimes.close()
        for context_id in list(self.container.contexts):
            self.lifetimes.forget(context_id)

    def statistics(self) -> dict[str, int]:
        return {"contexts": len(self.container.contexts)}
