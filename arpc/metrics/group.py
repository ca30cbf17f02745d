"""The answers of all workers of a group, kept by the worker that asks. A slow or dead worker delays no other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, TypeVar

import msgspec

from arpc.agent.agent import Agent
from arpc.agent.client.future import Future
from arpc.errors import ArpcError, ProtocolError
from arpc.ids import WorkerInfo
from arpc.wire.messages import Inspect

__all__ = ["Answer", "GroupView"]

T = TypeVar("T")

_ASK_TIMEOUT_S: Final = 3.0
"""A graceful shutdown waits for calls in flight, and so for these questions: no longer than this."""
_LATE_S: Final = 5.0
_FORGET_S: Final = 60.0
"""How long a lost worker is still shown."""


class Answer(msgspec.Struct, Generic[T]):
    """The last answer of one worker."""

    info: WorkerInfo
    value: T | None = None
    at: float = 0.0
    """The time of the answer, by the loop's clock."""
    error: str = ""
    """The reason why the worker does not answer; empty if it does."""
    failing_since: float | None = None

    def state(self, now: float) -> str:
        """Return ``ok``, ``late`` or ``lost``."""
        if self.error:
            return "lost"
        return "late" if now - self.at > _LATE_S else "ok"


class GroupView(Generic[T]):
    """The answers of all workers to one question."""

    def __init__(
        self,
        agent: Agent,
        question: tuple[Any, ...],
        decode: Callable[[bytes], T],
        meet: Callable[[], Awaitable[None]],
        only: str = "",
    ) -> None:
        """``only`` is the name of the only worker to ask; empty for all workers."""
        self._agent = agent
        self._question = question
        self._decode = decode
        self._meet = meet
        self._only = only
        self.answers: dict[str, Answer[T]] = {}
        self.questions_asked = 0
        self._asked: dict[str, Future[Any]] = {}

    @property
    def under_way(self) -> int:
        """The number of workers that have not answered yet."""
        return len(self._asked)

    async def refresh(self, patience_s: float) -> dict[str, Answer[T]]:
        """Ask each worker with no question pending, and wait at most ``patience_s``. Late workers keep old answers."""
        await self._meet()
        agent = self._agent
        now = agent.loop.time()
        present = {peer.info.name: peer.info for peer in agent.peers if self._only in {"", peer.info.name}}
        for name in list(self.answers):
            answer = self.answers[name]
            is_forgotten = answer.failing_since is not None and now - answer.failing_since > _FORGET_S
            if name not in present or (is_forgotten and agent.is_elastic):
                del self.answers[name]
        for name, info in present.items():
            if name not in self.answers:
                self.answers[name] = Answer(info, at=now)
            self.answers[name].info = info
            if name not in self._asked and not agent.is_closing:
                self._ask(name)
        # questions in flight are not cancelled with the caller, so that the next refresh gets their answers
        if self._asked:
            await asyncio.wait(self._asked.values(), timeout=patience_s)
        return self.answers

    def _ask(self, name: str) -> None:
        try:
            asked = self._agent.request(Inspect, name, self._question, timeout=_ASK_TIMEOUT_S)
        except ArpcError as error:
            self._fail(self.answers[name], error)
            return
        self.questions_asked += 1
        self._asked[name] = asked
        asked.add_done_callback(lambda asked: self._answered(name, asked))

    def _answered(self, name: str, asked: asyncio.Future[Any]) -> None:
        del self._asked[name]
        answer = self.answers.get(name)
        if asked.cancelled():
            return
        error = asked.exception()
        if answer is None:
            return
        if error is not None:
            self._fail(answer, error)
            return
        try:
            answer.value = self._decode(asked.result())
        except msgspec.MsgspecError as unreadable:
            self._fail(answer, ProtocolError(f"worker {name!r} answers as another version of arpc does: {unreadable}"))
            return
        answer.at = self._agent.loop.time()
        answer.error = ""
        answer.failing_since = None

    def _fail(self, answer: Answer[T], error: BaseException) -> None:
        answer.error = str(error) or type(error).__name__
        if answer.failing_since is None:
            answer.failing_since = self._agent.loop.time()

    def close(self) -> None:
        for asked in list(self._asked.values()):
            asked.cancel()
