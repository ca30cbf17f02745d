"""Answers that threads send themselves, without waking the loop.

The thread in which a plain function ends encodes the answer. Unless that takes something that belongs to the loop
(RRefs, metadata of most interceptors, large tensors, a schema to announce), it goes to the *outbox* of its connection,
and the thread sends all that is there before it goes to sleep, in one write. The loop sends what a thread leaves
behind, because the peer does not take it now or the thread is stuck in its next function.

With all answers in one write, caller and callee would wait for each other, and one of two CPUs would always be idle. So
if the caller has another CPU, half of the answers go ahead. On one CPU, fewer writes are better.

A thread that has an answer takes its request out of the connection's table (`Inbound.claim`), which is atomic. A
cancellation, a deadline and the end of a connection do the same, so each request ends once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from arpc.agent.server.replies import TakesLoopError
from arpc.agent.server.run import NO_CONTEXT, TO_BE_FETCHED, Run
from arpc.agent.server.thread_pool import Outbox
from arpc.errors import ConnectionClosedError
from arpc.transport.write_lock import WriteLock
from arpc.user_errors import is_coroutine
from arpc.wire.messages import MessageType
from arpc.wire.values.content import Content

if TYPE_CHECKING:
    from arpc.agent.server.inbound import Inbound
    from arpc.agent.server.thread_job import ThreadJob

__all__ = ["ThreadReplies"]

_WRITE_BYTES: Final = 1 << 16
_FEWEST_A_WRITE: Final = 8
_MOST_A_WRITE: Final = 32
_WRITES_A_LOOK: Final = 32
"""Between two looks whether the peer is on the same CPU: processes are moved seldom."""
_REPLY: Final = int(MessageType.REPLY)
_NOTHING: Final = Content(b"")


class ThreadReplies(Outbox):
    """The outbox of one connection."""

    __slots__ = (
        "_answers",
        "_encode",
        "_inbound",
        "_is_peer_elsewhere",
        "_most_running",
        "_readmit",
        "_until_look",
        "_write_lock",
    )

    def __init__(
        self,
        inbound: Inbound,
        write_lock: WriteLock,
        encode: Callable[[Run, Any], Content],
        readmit: Callable[[Inbound], None],
    ) -> None:
        """``encode`` makes the content of a reply, in any thread. Raises `TakesLoopError` if it cannot."""
        super().__init__()
        self._answers: deque[bytes] = deque()
        """Frames that have not been sent."""
        self._encode = encode
        self._inbound = inbound
        self._write_lock = write_lock
        self._readmit = readmit
        self._is_peer_elsewhere = False
        self._until_look = 0
        self._most_running = 0

    @property
    def has_unsent(self) -> bool:
        """Whether answers wait to be written."""
        return bool(self._answers)

    def put(self, job: ThreadJob, result: Any) -> bool:
        """Keep the result of a request to be sent; False if that takes the loop. In the thread of the request.

        What the loop needs not do again is noted in the job.
        """
        run = job.run
        if run.ended or (result is not None and is_coroutine(result)):
            return False
        creation = run.creation
        try:
            answer = result if creation is None else creation.answer(run, result)
            content = _NOTHING if answer is None and not run.meta else self._encode(run, answer)
        except TakesLoopError as error:
            job.pickled = error.args
            return False
        except BaseException as error:  # noqa: BLE001 - pickling runs user code; whatever it raises is the caller's
            if creation is None:
                job.error = error
            else:
                job.content = self._encode(run, TO_BE_FETCHED)  # the caller's fetch says why it cannot be sent
            return False
        inbound = self._inbound
        data = inbound.connection.frame_in_thread(_REPLY, run.id, content)
        if data is None or len(data) > _WRITE_BYTES:
            job.content = content
            return False
        if not inbound.claim(run):
            return False  # it was cancelled meanwhile
        run.context = NO_CONTEXT
        if creation is not None:
            creation.answered(run, result)
        elif run.function.results.unsurprising_bytes < 0:
            run.function.results.saw(len(data))
        self._answers.append(data)
        return True

    def send(self) -> None:
        """Send all there is, in any thread but the loop's."""
        answers = self._answers
        if len(answers) > 1:
            self._find_portion()
        while answers:
            try:
                frames = [answers.popleft()]
            except IndexError:
                break  # another thread sends it
            if answers:
                self._join(frames)
            if not self._write_lock.send(frames):
                answers.extendleft(reversed(frames))
                self._leave_to_loop()
                return
        # Looked at after requests have been taken out: if it is false now, the code that makes it true sees the room
        if self._inbound.is_full:
            self._leave_to_loop()

    def _join(self, frames: list[bytes]) -> None:
        """Add the next answers, as many as go with the first."""
        left_bytes = _WRITE_BYTES - len(frames[0])
        with suppress(IndexError):
            while left_bytes > 0:
                data = self._answers.popleft()
                frames.append(data)
                left_bytes -= len(data)

    def _find_portion(self) -> None:
        """Find how many answers go at once: half of what the caller seems to have under way, if it is elsewhere."""
        running = len(self._inbound.running) + len(self._answers)
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
        inbound, answers = self._inbound, self._answers
        with suppress(IndexError):
            while True:
                data = answers.popleft()
                with suppress(ConnectionClosedError):  # then the caller knows
                    inbound.connection.send(data)
        if inbound.is_full:
            self._readmit(inbound)
