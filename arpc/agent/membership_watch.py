"""Watches the other workers of the group, and tells listeners what became of them.

It hears of connections from the agent, and of workers that come and go in an elastic group from its log. While there
are listeners, it also keeps a connection to every other worker, whose end shows at once that the worker has died.
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
"""How often the log of an elastic group is looked at, at most."""

LostCallback = Callable[[MemberLost], object]


class MembershipWatch(PeerWatcher):
    """What one worker knows of the others, kept up to date."""

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
        """The agent whose connections tell of the others."""
        self._agent = agent
        self.roster.forget = agent.forget

    def identify(self, _: WorkerInfo) -> None:
        """Nothing is said to others here."""

    def start(self) -> None:
        """The agent knows the group."""
        for peer in self._agent.peers:
            self._seen(peer.info)
        if self._rendezvous.is_elastic:
            self._own(self._follow_log())

    # -- for people

    def listen(self) -> MemberStream:
        """A stream of what happens from now on."""
        stream = self.roster.stream()
        self._seek_all()
        return stream

    def on_lost(self, callback: LostCallback) -> Callable[[], None]:
        """Call something for each worker that is lost from now on; what is returned takes that back."""
        key = object()  # a callback that is given twice is called twice, and taken back one by one
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

    # -- told by the agent

    def peer_connected(self, peer: WorkerInfo) -> None:
        self._seen(peer)

    def peer_disconnected(self, peer: WorkerInfo, *, has_left: bool) -> None:
        if has_left:
            self.roster.left(peer)
        else:
            self.roster.suspected(peer, "the connection broke, or nothing was heard of it")

    def wants(self, peer: WorkerInfo) -> bool:
        return not self._is_closed and (bool(self._callbacks) or self.roster.is_heard)

    def peer_lost(self, peer: WorkerInfo, reason: str) -> None:
        self.roster.lost(peer, reason)

    def _seen(self, worker: WorkerInfo) -> None:
        peer = self._agent.peer(worker)
        if peer is not None and worker != self._agent.info and peer.incarnation is not None:
            self.roster.seen(worker, peer.incarnation)

    # -- told by the group

    async def _follow_log(self) -> None:
        try:
            async for change in self._rendezvous.changes(interval_s=self._interval_s):
                if not isinstance(change, Joined):
                    self._gone(change.record)
                elif change.record.name != self._agent.info.name:  # else it is this worker, or who has its name now
                    await self._came(change.record)
        except RendezvousError as error:
            logger.warning(
                "worker %s no longer learns which workers join or leave its group: %s", self._agent.info.name, error
            )

    async def _came(self, record: WorkerRecord) -> None:
        # A log is about the past: it may have gone since, and another may have come under its name
        try:
            current = await self._agent.resolve(record.name)
        except (UnknownWorkerError, RendezvousError):
            return  # it has gone; or the store is lost, and whoever is in the next one is told of again
        except ConfigurationError as error:
            logger.warning("worker %s cannot be called from %s: %s", record.name, self._agent.info.name, error)
            return
        # nothing was awaited since that was true
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
        except BaseException as error:  # noqa: BLE001 - the callbacks after it, and other features, must hear of it too
            _log_failed_callback(event, error)
            return
        if is_coroutine(result):
            self._own(self._await(cast("Any", result), event))

    async def _await(self, coroutine: Coroutine[Any, Any, Any], event: MemberLost) -> None:
        try:
            await coroutine
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001 - of a task, SystemExit would end the loop
            _log_failed_callback(event, error)

    def _own(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = self._context.copy().run(self._agent.loop.create_task, coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Streams end, and callbacks are called no more. What callbacks have begun is cancelled."""
        self._is_closed = True
        self._callbacks.clear()
        self.roster.close()
        # not awaited: one of them may be what shuts this worker down
        for task in self._tasks:
            task.cancel()


def _log_failed_callback(event: MemberLost, error: BaseException) -> None:
    # not as the exception of the record: whoever formats that runs code of the user
    logger.error("a callback for the loss of worker %s raised\n%s", event.worker.name, stack_of(error))
