"""The peers that one worker knows, by name, id and `WorkerInfo`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from arpc.agent.peers.peer import Peer
from arpc.errors import UnknownWorkerError, not_run
from arpc.group.membership import WorkerRecord
from arpc.ids import WorkerInfo

__all__ = ["PeerDirectory"]


class PeerDirectory:
    """The peers of one worker, itself among them."""

    def __init__(
        self,
        me: WorkerInfo,
        make: Callable[[WorkerInfo], Peer],
        *,
        is_elastic: bool,
        same_main: Callable[[Any], bool],
        replaced: Callable[[Peer], None],
    ) -> None:
        """``replaced`` is called with a peer whose name another worker has taken."""
        self.me = me
        self.by_key: dict[Any, Peer] = {}
        """The peers by name, id and `WorkerInfo`."""
        self.is_elastic = is_elastic
        """Whether the group is elastic: unknown workers may join at any time."""
        self.make = make
        self._same_main = same_main
        self._replaced = replaced

    def get(self, to: str | int | WorkerInfo) -> Peer | None:
        """Return the peer of that name, id or info, None if it is not known."""
        try:
            return self.by_key.get(to)
        except TypeError:
            return None

    def known(self, to: str | int | WorkerInfo) -> Peer:
        """Return the peer of that name, id or info. Raises `UnknownWorkerError`, or `TypeError` for another type."""
        peer = self.get(to)
        if peer is None:
            raise self.unknown(to)
        return peer

    def name_of(self, to: Any) -> str:
        peer = self.get(to)
        return peer.info.name if peer is not None else str(to)

    def __iter__(self) -> Iterator[Peer]:
        return iter(tuple(dict.fromkeys(self.by_key.values())))

    def unknown(self, to: Any) -> Exception:
        """Return the error of a call to a worker that is not known."""
        if not isinstance(to, str | int | WorkerInfo):
            return TypeError(f"a worker is given by name, id or WorkerInfo, not {type(to).__qualname__}")
        known = ", ".join(sorted(peer.info.name for peer in self))
        return not_run(UnknownWorkerError(f"worker {self.me.name!r} knows no worker {to!r}; it knows {known}"))

    def add(self, record: WorkerRecord) -> Peer:
        """Add a worker, so that calls can name it, or update its record; returns its peer."""
        peer = self.by_key.get(record.name)
        if peer is None:
            peer = self.make(record.info)
            peer.is_verified = not self.is_elastic or record.id == self.me.id
        if peer.incarnation is not None and peer.incarnation != record.incarnation:
            # another incarnation has taken the name
            self._replaced(peer)
            for old in (peer.info.id, peer.info):
                self.by_key.pop(old, None)
            peer.succeeded_by(record.info)
        peer.incarnation = record.incarnation
        peer.main_by_value = not self._same_main(record.main)
        for key in (record.name, record.id, record.info):
            self.by_key[key] = peer
        return peer

    def forget(self, worker: WorkerInfo) -> bool:
        """Forget a worker that is gone; False if it must be remembered.

        A group of fixed size gets no other workers. In an elastic one, a later call to this name asks the group again.
        """
        if not self.is_elastic:
            return False
        peer = self.by_key.get(worker.name)
        if peer is not None and peer.info != worker:
            return True  # another has its name, and everything kept by name belongs to that one
        if peer is not None and not peer.is_at_rest:
            return False
        for key in (worker.name, worker.id, worker):
            self.by_key.pop(key, None)
        return True
