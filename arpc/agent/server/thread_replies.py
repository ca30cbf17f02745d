"""Replies that threads send themselves, without waking the loop.

The thread in which a plain function ends encodes the reply. Unless that needs something that belongs to the loop
(RRefs, metadata of most interceptors, large tensors, a schema to announce), the reply goes to the *outbox* of its
connection, and the thread sends the whole outbox before it goes to sleep, in one write. The loop sends what a thread
leaves in the outbox, because the peer does not read now or the thread is stuck in its next function.

With all replies in one write, caller and callee would wait for each other, and one of two CPUs would always be idle. So
if the caller has another CPU, half of the replies are sent ahead. On one CPU, fewer writes are better.

A thread that has a reply takes its request out of the connection's table (`Inbound.claim`), which is atomic. So do a
cancellation, a deadline and the end of a connection, so that each request ends once.
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
"""The writes between two checks whether the peer is on the same CPU: the system seldom moves processes."""
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
        """``encode`` makes the content of a reply, in any thread, or raises `TakesLoopError` if only the loop can."""
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
        """Whether replies wait to be written."""
        return bool(self._answers)

    def put(self, job: ThreadJob, result: Any) -> bool:
        """Put the reply to a request into the outbox; False if that takes the loop. Called in the request's thread.

        Work that the loop need not do again is stored in the job.
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
        except BaseException as error:  # noqa: BLE001 - pickling runs user code; any error is sent to the caller
            if creation is None:
                job.error = error
            else:
                job.content = self._encode(run, TO_BE_FETCHED)  # the caller's fetch raises the reason
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
        elif run.function.results.ignored_up_to_bytes < 0:
            run.function.results.saw(len(data))
        self._answers.append(data)
        return True

    def send(self) -> None:
        """Send all replies, in any thread but the loop's."""
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
        # Checked after requests have been taken out: if it is false now, the code that sets it sees the room
        if self._inbound.is_full:
            self._leave_to_loop()

    def _join(self, frames: list[bytes]) -> None:
        """Add the next replies, as many as fit into one write with the first."""
        left_bytes = _WRITE_BYTES - len(frames[0])
        with suppress(IndexError):
            while left_bytes > 0:
                data = self._answers.popleft()
                frames.append(data)
                left_bytes -= len(data)

    def _find_portion(self) -> None:
        """Set how many replies go into one write: half of the requests in flight, if the caller has another CPU."""
        running = len(self._inbound.running) + len(self._answers)
        # A race between threads only makes the next check a bit earlier or later
        if self._until_look:
            self._until_look -= 1
            if running <= self._most_running:
                return  # other requests may still be in a socket
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
        """Send all replies, on the loop."""
        inbound, answers = self._inbound, self._answers
        with suppress(IndexError):
            while True:
                data = answers.popleft()
                with suppress(ConnectionClosedError):  # the caller's end is closed, too
                    inbound.connection.send(data)
        if inbound.is_full:
            self._readmit(inbound)
