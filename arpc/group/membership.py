"""The parts that both kinds of groups share: the record of a worker, and the contract of a rendezvous."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import ClassVar, Final, NoReturn, TypeAlias, TypeVar

import msgspec

from arpc.devices import DeviceClaims
from arpc.errors import ConfigurationError, RendezvousError, UnknownWorkerError
from arpc.group.group_store import GroupStore, KeyValues, deadline_after
from arpc.ids import WorkerId, WorkerInfo, check_worker_name

__all__ = [
    "Joined",
    "Left",
    "MakeRecord",
    "Probe",
    "Rendezvous",
    "StaleRecordError",
    "WorkerRecord",
    "host_fingerprint",
    "main_fingerprint",
]

T = TypeVar("T")

MIXED_TEXT: Final = "RPC group mixes statically and dynamically initialized members which is not supported."
MIXED: Final = "mixed"
"""The counter of encounters with a worker of the other kind. A worker that sees it grow was encountered."""

PRESENT_STATIC: Final = "present/static"
PRESENT_ELASTIC: Final = "present/elastic"
"""The counters of the workers of each kind. A killed worker stays counted until another takes its place."""

FAILURE_GRACE_S: Final = 5.0
"""How long the host of the store stays so that other workers can read why the group did not form."""

CANCELLED_GRACE_S: Final = 0.5
REOPEN_DELAY_S: Final = 0.02
UNDO_LIMIT_S: Final = 2.0
"""A worker that leaves does not wait long for a store that does not answer."""
ITEMS_IN_TEXT: Final = 32


class WorkerRecord(msgspec.Struct, frozen=True):
    """The record that a worker publishes to its group."""

    name: str
    id: WorkerId
    incarnation: int
    """63 random bits, new at each start: they distinguish a worker from its predecessor of the same name."""
    addresses: tuple[str, ...]
    host: str
    """Identity of the machine: workers with the same one can share unix sockets and memory."""
    main: str
    """Hash of the ``__main__`` script."""
    devices: DeviceClaims = DeviceClaims()
    """The worker's devices besides the CPU, and its device maps."""

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(self.name, self.id)


def main_fingerprint() -> str:
    """Return a hash of the script that runs; empty for notebooks and interactive sessions, which no peer can share."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if not path:
        return ""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32]
    except OSError:
        return ""


def host_fingerprint() -> str:
    """Return an identity that is equal for processes on the same machine, which see each other's sockets."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}-{uuid.getnode():x}"


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """A worker joined an elastic group."""

    record: WorkerRecord


class Left(msgspec.Struct, frozen=True, tag="left"):
    """A worker left an elastic group, or was found dead by the worker that has its name now."""

    record: WorkerRecord


class StaleRecordError(RendezvousError):
    """The store is lost, so the worker that has a name or id now is not known. ``known`` had it before."""

    def __init__(self, text: str, known: WorkerRecord) -> None:
        super().__init__(text)
        self.known = known


MakeRecord: TypeAlias = Callable[[WorkerId], WorkerRecord]
"""Makes the record of this worker once its id is known."""

Probe: TypeAlias = Callable[[WorkerRecord], Awaitable[bool]]
"""Returns whether the worker of a record is alive: that very incarnation, not another worker at its address."""

encode = msgspec.msgpack.Encoder().encode

_record_decoder = msgspec.msgpack.Decoder(WorkerRecord)


def decode(packed: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Unpack a worker's entry in the store. Raises `RendezvousError` if it is malformed."""
    try:
        return decoder.decode(packed)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RendezvousError(
            f"the store holds {packed[:64]!r} where a worker's entry should be: is another version of arpc using it?"
        ) from error


def decode_record(packed: bytes) -> WorkerRecord:
    return decode(packed, _record_decoder)


class Presence:
    """One worker, counted in the store among those of its kind, where none of the other kind may be.

    A worker first counts itself and then looks for workers of the other kind, so of two at least one sees the other.
    """

    mine: ClassVar[str]
    others: ClassVar[str]
    """The counter of the other kind; ``mine`` is that of this worker's kind."""

    def __init__(self) -> None:
        self._mixed_before = 0
        self._is_counted = False

    def enter(self, kv: KeyValues) -> bool:
        """Count this worker. Returns False if there are workers of the other kind, which notice it by `is_mixed`."""
        self._be_counted(kv)
        kv.add(self.mine, 1)
        if kv.count(self.others) == 0:
            return True
        kv.add(MIXED, 1)
        return False

    def _be_counted(self, kv: KeyValues) -> None:
        """Record that this worker is counted, by itself or by another worker."""
        self._mixed_before = kv.count(MIXED)
        self._is_counted = True

    def is_mixed(self, kv: KeyValues) -> bool:
        """Whether a worker of the other kind came since the last call, or since `enter`."""
        before, self._mixed_before = self._mixed_before, kv.count(MIXED)
        return self._mixed_before != before

    def leave(self, kv: KeyValues) -> None:
        """Stop counting this worker. A second call does nothing."""
        if self._is_counted:
            self._is_counted = False
            if self._give_up_place(kv):
                kv.add(self.mine, -1)

    def forget(self) -> None:
        """Record that the store that counted this worker is lost: `leave` has nothing to undo in another one."""
        self._is_counted = False

    def _give_up_place(self, kv: KeyValues) -> bool:
        """Give up this worker's other entries in the store; returns False if another uncounted it already."""
        raise NotImplementedError


class Rendezvous:
    """One worker's membership in a group, from joining to leaving, and its view of the other members.

    Every method that uses the store raises `RendezvousError` when the store is lost.
    """

    def __init__(self, store: GroupStore) -> None:
        self._store = store
        self._record: WorkerRecord | None = None
        self._presence: Presence | None = None
        self._by_id: dict[WorkerId, WorkerRecord] = {}
        self._by_name: dict[str, WorkerRecord] = {}
        self._has_left = False

    @property
    def is_elastic(self) -> bool:
        """Whether workers may join and leave at any time."""
        return self._store.world_size is None

    @property
    def record(self) -> WorkerRecord:
        """This worker's own record."""
        if self._record is None:
            raise RendezvousError("this worker has not joined a group yet")
        return self._record

    async def join(
        self, name: str, make_record: MakeRecord, *, timeout_s: float = 60.0, probe: Probe | None = None
    ) -> WorkerRecord:
        """Become a member; a group of fixed size is complete when this returns. A `timeout_s` of 0 means no limit.

        The worker must listen on the addresses in the record before: other workers may `probe` them at once.

        Raises `ConfigurationError` for a name that no worker may have, `NameTakenError` (in a group of fixed size: on
        every worker) if two workers have the same name or rank, `RendezvousTimeoutError` if some workers did not come,
        and `RendezvousError` for anything else that keeps the group from forming. A join that fails or is cancelled
        leaves nothing behind in the store, and the other workers learn of it.
        """
        check_worker_name(name)
        if self._record is not None or self._has_left:
            raise RendezvousError("a rendezvous can be joined once")
        deadline = deadline_after(timeout_s)
        while True:
            try:
                await self._store.run(self._check_open)
                self._record = await self._join_once(name, make_record, probe, deadline, timeout_s)
            except BaseException as error:
                await self._withdraw(error)
                # A previous group may have closed its store. The store of this group is still to come, then.
                is_gone = isinstance(error, RendezvousError) and self._store.is_lost
                if not is_gone or self._now() >= deadline or not await self._store.reopen(deadline):
                    raise
                if self._presence is not None:
                    self._presence.forget()
                await asyncio.sleep(REOPEN_DELAY_S)
            else:
                return self._record

    async def _join_once(
        self, name: str, make_record: MakeRecord, probe: Probe | None, deadline: float, timeout_s: float
    ) -> WorkerRecord:
        """Become a member of this kind of group, in the current store. If this fails, `_depart` undoes its steps."""
        raise NotImplementedError

    async def members(self) -> tuple[WorkerRecord, ...]:
        """Return the workers of the group, by id: always the same ones, or those present now if it is elastic."""
        await self._catch_up()
        return tuple(self._by_id[worker_id] for worker_id in sorted(self._by_id))

    async def resolve(self, worker: str | WorkerId) -> WorkerRecord:
        """Find a worker by name or id. In an elastic group, this reads the store for new members first.

        Raises `UnknownWorkerError` if there is none, and `StaleRecordError` if the store cannot be read, but the
        worker is known from before.
        """
        await self._catch_up()
        record = self._known(worker)
        if record is None:
            what = f"named {worker!r}" if isinstance(worker, str) else f"with the id {worker}"
            there = listed(f"{known.name!r} (id {known.id})" for known in self._by_id.values())
            raise UnknownWorkerError(f"there is no worker {what} in the group; there are {there or 'none'}")
        return record

    def _known(self, worker: str | WorkerId) -> WorkerRecord | None:
        return self._by_name.get(worker) if isinstance(worker, str) else self._by_id.get(worker)

    async def _catch_up(self) -> None:
        """Read from the store which workers joined and left: in a group of fixed size, there are none."""

    async def gather(self, tag: str, value: bytes, *, timeout_s: float) -> dict[WorkerId, bytes]:
        """Return the values of all workers to every worker. All call it, with the same tags in the same order.

        It ends the same way for all: with all values, or with `RendezvousTimeoutError`, which names the workers that
        did not come before the first of the others timed out. A `timeout_s` of 0 means no limit.

        An elastic group has no fixed set of workers to wait for: it returns at once, with this worker's value only.
        """
        return {self.record.id: value}

    async def awaited(self, every_s: float) -> tuple[WorkerRecord, ...]:
        """Return the workers that have not come to the `gather` in progress.

        Only one worker gets them in each period of `every_s`, so that not all read the store at once.
        """
        return ()

    async def fail_gather(self, text: str) -> None:
        """End the `gather` in progress for all workers, with `RendezvousError` and this text: it can never complete."""

    async def changes(self, *, interval_s: float = 1.0) -> AsyncIterator[Joined | Left]:
        """Yield the workers that joined and left since this one joined, itself included if it was taken for dead.

        Reads the store every `interval_s`, at the cost of two small operations. Ends when the rendezvous is closed; for
        a group of fixed size, at once. Raises `RendezvousError` when a worker of a group of fixed size tries to join.
        """
        no_changes: tuple[Joined | Left, ...] = ()
        for change in no_changes:
            yield change

    async def leave(self, *, grace_s: float = 5.0) -> None:
        """Leave the group: the worker's name, or its rank in the next group in this store, is free again.

        The host of the store stays until all other workers have left, but no longer than `grace_s`.
        """
        if self._record is None or self._has_left:
            return
        self._has_left = True
        await self._depart(grace_s)

    async def aclose(self) -> None:
        """Close the store. Does not leave the group: call `leave` before."""
        self._has_left = True
        await self._store.aclose()

    def statistics(self) -> dict[str, int | str]:
        return {
            "worker": self._record.name if self._record else "",
            "group": "elastic" if self.is_elastic else "static",
            **self._store.statistics(),
            "members": len(self._by_id),
        }

    # -- for the two kinds --

    async def _depart(self, grace_s: float) -> None:
        """Undo this worker's changes to the store. The first step is submitted to its thread before any await."""
        is_host = self._store.access.is_host

        def undo(kv: KeyValues) -> None:
            if is_host:
                kv.set_closing(True)
            if self._presence is not None:
                self._presence.leave(kv)
            kv.say_goodbye()

        await self._store.run(undo, limit_s=UNDO_LIMIT_S)
        if is_host:
            await self._store.poll(lambda kv: not kv.has_guests() or None, deadline=self._now() + grace_s)

    async def _withdraw(self, error: BaseException) -> None:
        """Undo a join that failed."""
        if self._store.is_lost:
            return
        is_cancelled = isinstance(error, asyncio.CancelledError)
        with contextlib.suppress(RendezvousError):  # the error that made the join fail says more
            await self._depart(CANCELLED_GRACE_S if is_cancelled else FAILURE_GRACE_S)

    async def _is_alive(self, probe: Probe | None, record: WorkerRecord, deadline: float) -> bool:
        """Whether a worker is alive; True if that cannot be determined."""
        if probe is None:
            return True
        try:
            async with asyncio.timeout_at(None if deadline == float("inf") else deadline):
                return await probe(record)
        except TimeoutError:
            return True

    def _check_open(self, kv: KeyValues) -> None:
        """Raise `RendezvousError` if the store is closing. Its own host marks it as open instead."""
        if self._store.access.is_host:
            kv.set_closing(False)
        elif kv.is_closing():
            leave_closing_store(kv)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def leave_closing_store(kv: KeyValues) -> NoReturn:
    """Leave a closing store and raise `RendezvousError`: `Rendezvous.join` then looks for the next store."""
    kv.say_goodbye()
    kv.is_lost = True
    raise RendezvousError("the worker that hosts the store is leaving with it, and no other has come to host one")


def check_record(record: WorkerRecord, name: str, worker_id: WorkerId) -> WorkerRecord:
    """Return a worker's record. Raises `ConfigurationError` if it does not have the requested name and id."""
    if record.name != name or record.id != worker_id:
        raise ConfigurationError(f"the record of worker {name!r} (id {worker_id}) says {record.info!r}")
    return record


def listed(items: Iterable[str]) -> str:
    """Return the items with commas between them, and how many more there are than fit into a message."""
    texts = list(items)
    more = len(texts) - ITEMS_IN_TEXT
    return ", ".join(texts[:ITEMS_IN_TEXT]) + (f" and {more} more" if more > 0 else "")
