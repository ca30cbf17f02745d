"""Answers that threads send themselves, without waking the loop.

The thread in which a plain function ends encodes the answer. Unless that takes something that belongs to the loop
(RRefs, metadata, large tensors, a schema to announce), it goes to the *outbox* of its connection, and the thread sends
all that is there before it goes to sleep, in one write. The loop sends what a thread leaves behind, because the peer
does not take it now or the thread is stuck in its next function.

With all answers in one write, caller and callee would wait for each other, and one of two CPUs would always be idle. So
if the caller has another CPU, half of the answers go ahead. On one CPU, fewer writes are better.

To send an answer, a thread first takes its request out of the connection's table (`Inbound.claim`), which is atomic. A
cancellation, a deadline and the end of a connection do the same, so each request ends once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._C import _len_torch_function_stack as _count_function_modes

from arpc.agent.server.thread_pool import Outbox
from arpc.errors import ConnectionClosedError
from arpc.transport.write_lock import WriteLock
from arpc.user_errors import is_coroutine
from arpc.wire.messages import MessageType
from arpc.wire.values.content import Content

if TYPE_CHECKING:
    from arpc.agent.server.inbound import Inbound

__all__ = ["ThreadReplies"]

_WRITE_BYTES: Final = 1 << 16
_FEWEST_A_WRITE: Final = 8
_MOST_A_WRITE: Final = 32
_WRITES_A_LOOK: Final = 32
"""Between two looks whether the peer is on the same CPU: processes are moved seldom."""
_is_grad_enabled = torch.is_grad_enabled
_REPLY: Final = int(MessageType.REPLY)
_NOTHING: Final = Content(b"")
# A request that has ended must not keep its context: the two refer to each other
_NO_CONTEXT: Final = Context()


class ThreadReplies(Outbox):
    """The outbox of one connection."""

    __slots__ = (
        "_answers",
        "_encode",
        "_inbound",
        "_is_peer_elsewhere",
        "_most_running",
        "_readmit",
        "_turn",
        "_until_look",
    )

    def __init__(
        self,
        inbound: Inbound,
        turn: WriteLock,
        encode: Callable[[Any, Any], Content],
        readmit: Callable[[Any], None],
    ) -> None:
        """``encode`` makes the content of the reply to a request with a result, in any thread."""
        super().__init__()
        # Requests, and the frames that answer them
        self._answers: deque[tuple[Any, bytes]] = deque()
        self._encode = encode
        self._inbound = inbound
        self._turn = turn
        self._readmit = readmit
        self._is_peer_elsewhere = False
        self._until_look = 0
        self._most_running = 0

    def put(self, run: Any, result: Any) -> bool:
        """Keep the result of a request to be sent; False if that takes the loop. In the thread of the request.

        What the loop needs not do again is noted in the request: its ``content``, or its ``error``.
        """
        if run.ended:
            return False  # it was cancelled meanwhile
        if not _is_grad_enabled() or _count_function_modes():
            return False  # the function has left something switched, that could change how a tensor looks
        if is_coroutine(result):
            return False
        creation = run.creation
        try:
            content = self._encode(run, result if creation is None else creation.answer(run, result))
        except BaseException as error:  # noqa: BLE001 - pickling runs user code; whatever it raises is the caller's
            if creation is None:
                run.error = error
            else:
                run.content = _NOTHING  # the caller asks for the value, and that call says why it cannot be sent
            return False
        connection = self._inbound.connection
        data = connection.frame_in_thread(_REPLY, run.id, content.pickle, content.tensors)
        if data is None or len(data) > _WRITE_BYTES:
            run.content = content
            return False
        run.context = _NO_CONTEXT
        if creation is not None:
            creation.answered(run, result)
        self._answers.append((run, data))
        return True

    def send(self) -> None:
        """Send all there is, in any thread but the loop's."""
        if len(self._answers) > 1:
            self._find_portion()
        while self._answers:
            if not self._turn.send(self._take):
                self._leave_to_loop()
                return
        # Looked at after requests have been taken out: if it is false now, the code that makes it true sees the room
        if self._inbound.is_full:
            self._leave_to_loop()

    def _find_portion(self) -> None:
        """Find how many answers go at once: half of what the caller seems to have under way, if it is elsewhere."""
        running = len(self._inbound.running)
        # Threads may get in each other's way here; then it is looked a bit earlier or later
        if self._until_look:
            self._until_look -= 1
            if running <= self._most_running:
                return  # the others may be in a socket
        else:
            self._until_look = _WRITES_A_LOOK
            self._is_peer_elsewhere = self._inbound.connection.is_peer_elsewhere
        self._most_running = running
        half = running // 2 if self._is_peer_elsewhere else _MOST_A_WRITE
        self.answers_a_write = max(_FEWEST_A_WRITE, min(half, _MOST_A_WRITE))

    def _leave_to_loop(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._inbound.connection.loop.call_soon_threadsafe(self.send_on_loop)

    def send_on_loop(self) -> None:
        """Send all there is, on the loop."""
        inbound = self._inbound
        while self._answers:
            with self._turn.lock:
                frames = self._take()
            with suppress(ConnectionClosedError):  # then the caller knows
                for data in frames:
                    inbound.connection.send(data)
        if inbound.is_full:
            self._readmit(inbound)

    def _take(self) -> list[bytes]:
        """The next answers, which are sent from now on. The caller holds the write lock."""
        return self._inbound.claim_answers(self._answers, _WRITE_BYTES)
