"""The pool of connections to one peer on which threads make blocking calls, besides the loop's own connection.

A thread takes one out of `ThreadConnections.free` for the time of a call and puts it back: both are atomic, so there is
no lock. Everything else here belongs to the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Final
from weakref import WeakSet

from arpc.agent.peers.peer import MakeError
from arpc.agent.server.functions import name_of
from arpc.compat.blocking_client.reply_poll import ReplyPoll
from arpc.compat.blocking_client.thread_connection import ThreadConnection
from arpc.errors import ArpcError
from arpc.log import get_logger
from arpc.transport.connection import Connection

__all__ = ["ThreadConnections"]

logger = get_logger("arpc.connections")

IDLE_S: Final = 60.0
"""Seconds without a call after which a connection is closed."""
_LOOK_S: Final = 5.0
_RETRY_S: Final = 30.0
_LATE_S: Final = 1.0
MAX_OWED: Final = 32
"""With so many given-up calls unanswered, a connection is set aside: the peer limits how many run at once."""
_UNUSED: Final = "no thread uses it"


class ThreadConnections:
    """The pool. Its connections belong to the loop's connection to the peer, and end with that."""

    def __init__(
        self,
        name: str,
        loop: asyncio.AbstractEventLoop,
        open_connection: Callable[[], Awaitable[ThreadConnection]],
        limit: int,
        longest_poll_s: float = 0.0,
    ) -> None:
        self.name = name
        self.limit = limit
        """The most connections at a time."""
        self.free: list[ThreadConnection] = []
        """The connections that no thread uses, the most recently used last. `end` replaces the list."""
        self.aside: list[ThreadConnection] = []
        """Connections with so many given-up calls unanswered that the peer might not run the next one at once."""
        self.main: Connection | None = None
        """The loop's connection to the peer; None if there is none, and then this pool has none either."""
        self.is_asked_for = False
        """True while another connection is being opened, and for a while after that has failed."""
        self.not_for: set[int] = set()
        """The numbers of functions whose results are faster on the loop's connection."""
        self._poll = ReplyPoll(longest_poll_s, self._is_peer_elsewhere)
        """Polls for the replies of all calls to the peer."""
        self._loop = loop
        self._open_connection = open_connection
        self._all: set[ThreadConnection] = set()
        self._made_before = 0
        self._ask_again_at = 0.0
        self._opening: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        _every_pool.add(self)

    @property
    def calls_made(self) -> int:
        """The number of calls so far."""
        return self._made_before + sum(connection.calls_made for connection in self._all)

    @property
    def under_way(self) -> list[ThreadConnection]:
        """The connections with a call in flight. A thread that was interrupted may hold others that are not free."""
        return [connection for connection in self._all if connection.calling is not None]

    @property
    def all(self) -> frozenset[ThreadConnection]:
        return frozenset(self._all)

    def calls(self) -> list[tuple[int, str, float | None]]:
        """Return the calls in flight: id, name of the function, seconds until the timeout (None if there is none)."""
        now = monotonic()
        # snapshot: a call may end at any moment
        found = [(one.call_id, one.calling, one.due_at) for one in self._all]
        return [(id_, name_of(f), due_at - now if due_at else None) for id_, f, due_at in found if f is not None]

    # -- opening

    def open_another(self, main: Connection | None) -> None:
        """Open a connection after a thread found none free. ``main`` is the loop's present connection to the peer."""
        is_other = self.main is not None and self.main is not main  # its end will be reported soon
        if main is None or not main.is_open or is_other or self._opening is not None or len(self._all) >= self.limit:
            self.is_asked_for = self._opening is not None
            return
        self.main = main
        self._opening = self._loop.create_task(self._run_open(main))

    async def _run_open(self, main: Connection) -> None:
        connection: ThreadConnection | None = None
        try:
            connection = await self._open_connection()
        except (OSError, ArpcError) as error:
            # calls take the loop
            logger.debug("no connection of a thread to worker %s: %s", self.name, error, extra={"peer": self.name})
        finally:
            self._opening = None
        # the loop's connection may have been lost meanwhile
        if connection is not None and main is self.main:
            connection.poll = self._poll
            self._all.add(connection)
            self.free.append(connection)
        elif connection is not None:
            connection.close(_UNUSED)
        self.is_asked_for = connection is None
        if connection is None:
            self._ask_again_at = monotonic() + _RETRY_S
        self._arm()

    def _is_peer_elsewhere(self) -> bool:
        """Whether the peer can run while a thread polls. Called in any thread."""
        main = self.main
        return main is not None and main.is_peer_elsewhere

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(_LOOK_S, self._look_after)

    def _look_after(self) -> None:
        """Close idle connections, wake threads that have waited too long, and let threads ask again."""
        self._timer = None
        now = monotonic()
        if now >= self._ask_again_at:
            self.is_asked_for = self._opening is not None
        for connection in self.under_way:
            # A signal restarts the timeout of a socket: with frequent signals, it would wait for ever
            if 0 < connection.due_at < now - _LATE_S:
                connection.wake()
        free = self.free
        for connection in self.all.difference(free):
            # A thread that is interrupted between two steps may lose a connection that it has just taken. If a thread
            # is about to use this one, it finds it closed and sends nothing.
            if connection.calling is None and not connection.owed and now - connection.used_at >= IDLE_S:
                connection.close(_UNUSED)
                self.forget(connection)
        for _ in range(len(self.aside)):
            resting = self.aside.pop(0)
            if not resting.is_sound():
                resting.close()
                self.forget(resting)
            else:
                (self.aside if len(resting.owed) >= MAX_OWED else free).append(resting)
        kept: list[ThreadConnection] = []
        while (unused := self._take(free, 0)) is not None:  # the least recently used one
            if now - unused.used_at < IDLE_S:
                kept.append(unused)
                break
            if unused.is_sound() and unused.owed:
                kept.append(unused)  # closing it would tell the peer that the replies are not wanted
            else:
                unused.close(_UNUSED)
                self.forget(unused)
        free[:0] = kept
        if self._all or self.is_asked_for:
            self._arm()

    @staticmethod
    def _take(free: list[ThreadConnection], index: int = -1) -> ThreadConnection | None:
        """Take a connection, so that no thread can; None if there is none. Checking the list first would be a race."""
        try:
            return free.pop(index)
        except IndexError:
            return None

    def forget(self, connection: ThreadConnection) -> None:
        """Remove a connection that has ended, by itself or because it was idle."""
        if connection in self._all:
            self._all.remove(connection)
            self._made_before += connection.calls_made

    # -- closing

    def lost(self, main: Connection, make_error: MakeError) -> None:
        """If ``main``, a connection of the loop that has ended, is theirs, end all connections and fail their calls."""
        if main is self.main:
            self.end(make_error)

    def end(self, make_error: MakeError) -> None:
        """End all connections, and fail the calls in flight on them."""
        self.main = None
        free, self.free = self.free, []
        connections, self._all = self._all, set()
        for connection in connections:
            connection.ending = make_error
            connection.is_ended = True  # so a thread that puts it back now closes it
            self._made_before += connection.calls_made
        while (unused := self._take(free) or self._take(self.aside)) is not None:
            unused.close()
            connections.discard(unused)
        for connection in connections:
            connection.wake()  # the thread that uses it closes it

    async def aclose(self, make_error: MakeError) -> None:
        self.limit = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._opening is not None:
            self._opening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._opening
        self.end(make_error)

    def abandon(self) -> None:
        """Drop all connections in a forked child: they are the parent's."""
        self.limit = 0
        free, self.free = self.free, []
        free.clear()
        self.aside.clear()
        for connection in self._all:
            connection.abandon()
        self._all = set()


_every_pool: WeakSet[ThreadConnections] = WeakSet()


def _forked() -> None:
    for connections in list(_every_pool):
        connections.abandon()


os.register_at_fork(after_in_child=_forked)
