"""Watches the other workers of the group, and notifies listeners when one joins, leaves, is lost or returns.

The agent reports connections, and the log of an elastic group reports the workers that join and leave. While there are
listeners, the watch also keeps a connection to every other worker, whose end shows at once that the worker has died.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Final, cast

from arpc.agent.agent import Agent
from arpc.agent.peers.link import PeerWatcher
from arpc.errors import ConfigurationError, RendezvousError, UnknownWorkerError
from arpc.group.membership import Joined, Rendezvous, WorkerRecord
from arpc.group.roster import MemberEvent, MemberLost, MemberStream, Roster
from arpc.ids import WorkerInfo
from arpc.log import get_logger
from arpc.options import RpcOptions
from arpc.user_errors import is_coroutine, stack_of

__all__ = ["MembershipWatch"]

logger = get_logger("arpc.membership")

_LOOK_S: Final = 1.0
"""The longest interval at which the log of an elastic group is read."""

LostCallback = Callable[[MemberLost], object]


class MembershipWatch(PeerWatcher):
    """The view that one worker has of the other workers, kept up to date."""

    def __init__(self, rendezvous: Rendezvous, options: RpcOptions, context: Context) -> None:
        self.roster = Roster()
        self.roster.changed = self._changed
        self._rendezvous = rendezvous
        self._context = context
        self._interval_s = min(_LOOK_S, options.heartbeat_interval or _LOOK_S)
        self._agent: Agent
        self._callbacks: dict[object, LostCallback] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    def attach(self, agent: Agent) -> None:
        """Set the agent, which reports connections to this watch."""
        self._agent = agent
        self.roster.forget = agent.forget

    def identify(self, _: WorkerInfo) -> None:
        """Do nothing: the watch sends no messages."""

    def start(self) -> None:
        """Start to watch, now that the agent knows the group."""
        for peer in self._agent.peers:
            self._seen(peer.info)
        if self._rendezvous.is_elastic:
            self._own(self._follow_log())

    # -- for users

    def listen(self) -> MemberStream:
        """Return a stream of the events from now on."""
        stream = self.roster.stream()
        self._seek_all()
        return stream

    def on_lost(self, callback: LostCallback) -> Callable[[], None]:
        """Call ``callback`` for each worker that is lost from now on; the returned function unregisters it."""
        key = object()  # a callback that is registered twice is called twice, and unregistered one by one
        self._callbacks[key] = callback
        self._seek_all()

        def stop() -> None:
            self._callbacks.pop(key, None)

        return stop

    def _seek_all(self) -> None:
        if not self._is_closed:
            for peer in self._agent.peers:
                self._seek(peer.info)

    def _seek(self, worker: WorkerInfo) -> None:
        peer = self._agent.peer(worker)
        if peer is not None and worker != self._agent.info and peer.connection is None:
            self._agent.connector.seek(peer, "it could not be connected to")

    # -- called by the agent

    def peer_connected(self, peer: WorkerInfo) -> None:
        self._seen(peer)

    def peer_disconnected(self, peer: WorkerInfo, *, has_left: bool) -> None:
        if has_left:
            self.roster.left(peer)
        else:
            self.roster.suspected(peer, "the connection broke, or nothing was heard of it")

    def wants(self, peer: WorkerInfo) -> bool:
        return not self._is_closed and (bool(self._callbacks) or self.roster.has_open_streams)

    def peer_lost(self, peer: WorkerInfo, reason: str) -> None:
        self.roster.lost(peer, reason)

    def _seen(self, worker: WorkerInfo) -> None:
        peer = self._agent.peer(worker)
        if peer is not None and worker != self._agent.info and peer.incarnation is not None:
            self.roster.seen(worker, peer.incarnation)

    # -- the log of the group

    async def _follow_log(self) -> None:
        try:
            async for change in self._rendezvous.changes(interval_s=self._interval_s):
                if not isinstance(change, Joined):
                    self._gone(change.record)
                elif change.record.name != self._agent.info.name:  # else it is this worker, or its successor
                    await self._came(change.record)
        except RendezvousError as error:
            logger.warning(
                "worker %s no longer learns which workers join or leave its group: %s", self._agent.info.name, error
            )

    async def _came(self, record: WorkerRecord) -> None:
        # The log is about the past: the worker may have left since, and another may have taken its name
        try:
            current = await self._agent.resolve(record.name)
        except (UnknownWorkerError, RendezvousError):
            return  # it has left; or the store is lost, and the next one reports its workers again
        except ConfigurationError as error:
            logger.warning("worker %s cannot be called from %s: %s", record.name, self._agent.info.name, error)
            return
        # still true, because nothing was awaited since
        if current.incarnation == record.incarnation:
            self._agent.add_peer(record)
            self._seen(record.info)
            self._seek(record.info)

    def _gone(self, record: WorkerRecord) -> None:
        if record.info == self._agent.info:
            logger.error("worker %s (id %d) was taken for dead: others let it in no more", *record.info)
        else:
            self.roster.left(record.info)

    # -- callbacks

    def _changed(self, event: MemberEvent) -> None:
        logger.debug("%s", event)
        if not isinstance(event, MemberLost):
            return
        for callback in tuple(self._callbacks.values()):
            self._context.copy().run(self._call, callback, event)

    def _call(self, callback: LostCallback, event: MemberLost) -> None:
        try:
            result = callback(event)
        except BaseException as error:  # noqa: BLE001 - other callbacks and features must be notified, too
            _log_failed_callback(event, error)
            return
        if is_coroutine(result):
            self._own(self._await(cast("Any", result), event))

    async def _await(self, coroutine: Coroutine[Any, Any, Any], event: MemberLost) -> None:
        try:
            await coroutine
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001 - SystemExit in a task would end the loop
            _log_failed_callback(event, error)

    def _own(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = self._context.copy().run(self._agent.loop.create_task, coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """End all streams, drop all callbacks, and cancel the coroutines that callbacks have returned."""
        self._is_closed = True
        self._callbacks.clear()
        self.roster.close()
        # not awaited: one of them may be the code that shuts this worker down
        for task in self._tasks:
            task.cancel()


def _log_failed_callback(event: MemberLost, error: BaseException) -> None:
    # not as exc_info: formatting that would run the user's code
    logger.error("a callback for the loss of worker %s raised\n%s", event.worker.name, stack_of(error))
