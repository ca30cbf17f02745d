"""A torch store made safe to use from an event loop.

A call into a store blocks, and while one thread waits inside a store client no other thread can use it. So each
`GroupStore` owns one daemon thread, which does all work on the store in the order of submission. None of this work ever
waits for a key: code that has to wait reads the key again later (`GroupStore.poll`).
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]  # torch says no __all__

from arpc.errors import RendezvousError
from arpc.log import get_logger

__all__ = ["Access", "GroupStore", "KeyValues", "StoreThread", "deadline_after", "first_line"]

logger = get_logger("arpc.rendezvous")

T = TypeVar("T")

PREFIX: Final = "arpc/"
"""The prefix of every key, as the store may serve process groups as well."""

ABSENT: Final = b"\xc1absent"
"""A value that no key ever has: 0xc1 is the one byte that msgpack never writes, and counters are digits."""

CLOSING: Final = "closing"
"""A key that is ``1`` from when the host of the store starts to leave until a host comes again."""

GUESTS: Final = "guests"
"""The counter of the workers that use a store which another worker hosts."""

OPERATION_LIMIT_S: Final = 30.0
"""A store that takes longer to answer counts as lost: its host is stopped, or the network is gone."""

CLOSE_LIMIT_S: Final = 1.0
IDLE_S: Final = 1.0
"""The thread ends after this long without a job."""
FIRST_DELAY_S: Final = 0.001
LONGEST_DELAY_S: Final = 0.05


def deadline_after(timeout_s: float) -> float:
    """Return the running loop's time when `timeout_s` will have passed; a timeout of 0 means no limit."""
    return asyncio.get_running_loop().time() + timeout_s if timeout_s else float("inf")


def first_line(error: Exception) -> str:
    """Return the text of an error, without the C++ stack that torch appends."""
    return str(error).partition("\n")[0] or type(error).__name__


@dataclass(frozen=True, slots=True)
class Access:
    """The location of a store, and whether this process serves it."""

    description: str
    host: str | None = None
    """The machine that serves the store; None if there is none, or it is not known."""
    port: int | None = None
    is_host: bool = False
    """Whether this process serves the store: other workers lose it when this one closes it."""
    settle_s: float = 0.0
    """How long the first worker waits for the workers of a group that had its store there before."""


class KeyValues:
    """The operations on a store, for its thread: short calls, none of which waits for a key to appear."""

    def __init__(self, store: Store, access: Access, released: Callable[[], None] = lambda: None) -> None:
        self.access: Final = access
        self._store: Store | None = store
        self._released = released
        self._is_guest = False
        self.is_lost = False
        self.operations = 0

    def peek(self, key: str) -> bytes | None:
        """Return the value of a key, or None if it has none (`Store.get` would wait for one)."""
        # Comparing with a value that no key has changes nothing, and returns that value if the key is not there.
        value: bytes = self._do("compare_set", PREFIX + key, ABSENT, ABSENT)
        return None if value == ABSENT else value

    def count(self, key: str) -> int:
        """Return the value of a counter. Adding 0 would return it too, but lets the file of a FileStore grow."""
        return int(self.peek(key) or 0)

    def set(self, key: str, value: bytes) -> None:
        self._do("set", PREFIX + key, value)

    def add(self, key: str, amount: int) -> int:
        """Change a counter; returns its new value."""
        total: int = self._do("add", PREFIX + key, amount)
        return total

    def swap(self, key: str, value: bytes, *, expected: bytes = b"") -> bytes:
        """Set a key if it has the expected value (by default: none); returns the value that it has then."""
        now: bytes = self._do("compare_set", PREFIX + key, expected, value)
        return now

    def fetch(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that are known to exist, in one operation."""
        values: list[bytes] = self._do("multi_get", [PREFIX + key for key in keys]) if keys else []
        return values

    # A store that one of the workers hosts ends with it. So the host first announces that it is leaving, then waits for
    # its guests to leave, while a new guest first counts itself and then checks whether the host is leaving.

    def enter(self) -> bool:
        """Count this worker as a guest of the store; returns False if the host is about to leave with it."""
        self._is_guest = True
        self.add(GUESTS, 1)
        if not self.is_closing():
            return True
        self.say_goodbye()
        return False

    def say_goodbye(self) -> None:
        """Stop counting this worker as a guest. It must not use the store any more, which may end right after."""
        if self._is_guest:
            self._is_guest = False
            self.add(GUESTS, -1)

    def has_guests(self) -> bool:
        return self.count(GUESTS) > 0

    def is_closing(self) -> bool:
        return self.peek(CLOSING) == b"1"

    def set_closing(self, is_closing: bool) -> None:
        self.set(CLOSING, b"1" if is_closing else b"0")

    def release(self) -> None:
        """Drop the store. A server in it ends unless another object refers to it."""
        if not self.is_lost:
            with contextlib.suppress(RendezvousError):
                self.say_goodbye()
        if self._store is not None:
            self._store = None
            self._released()
        self.is_lost = True

    def _do(self, operation: str, *args: object) -> Any:
        if self.is_lost:
            raise RendezvousError(f"the store {self.access.description} is closed, or was lost")
        self.operations += 1
        try:
            # The method is kept in no variable: the traceback of an error would keep it, the store and its server.
            return getattr(self._store, operation)(*args)
        except Exception as error:  # a store that the user made may raise anything
            self.is_lost = True
            raise RendezvousError(
                f"the store {self.access.description} was lost in {operation}(): {first_line(error)} "
                "(has its host, rank 0, ended?)"
            ) from error


class StoreThread:
    """One thread that runs functions in the order of submission, and reports their results to the loop.

    A function runs even if its caller does not wait any more. So when a step is cancelled and the one that undoes it is
    submitted next, the second can rely on the first. While there is nothing to do there is no thread either: all system
    calls of a process take longer when it has more than one, and most groups meet once.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit_nowait(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run a function after all that were submitted before. Raises `RendezvousError` if no thread can be started."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            settle: Callable[[], None]
            try:
                settle = partial(_settle, future, future.set_result, function())
            except Exception as error:  # noqa: BLE001 - raised where the result is awaited
                settle = partial(_settle, future, future.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits any more
                loop.call_soon_threadsafe(settle)

        with self._lock:
            if self._thread is None:
                # a daemon: a call into a store whose host is stopped may never return
                thread = threading.Thread(target=self._serve, name="arpc-store", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # there are too many, or the interpreter ends
                    raise RendezvousError(f"no thread could be started for the store: {error}") from error
                self._thread = thread
            self._jobs.put(job)
        return future

    def _serve(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._thread = None
                        return
                continue
            if job is None:
                return
            job()
            del job  # it holds the store, which may have to end before the next job comes

    async def run(self, function: Callable[[], T], *, limit_s: float | None) -> T:
        """Run a function in the thread. Raises `TimeoutError` after the limit; the function goes on nevertheless."""
        if self._is_closed:
            raise RendezvousError("the store is closed")
        future = self.submit_nowait(function)
        try:
            await asyncio.wait((future,), timeout=limit_s)
            if not future.done():
                raise TimeoutError
            return future.result()
        finally:
            future.cancel()  # without this, asyncio would log an error that no caller waits for any more

    async def aclose(self, last: Callable[[], None] | None = None) -> None:
        """Run one last function and end the thread."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            ended = self.submit_nowait(last or (lambda: None))
        except RendezvousError as error:
            logger.warning("the store is left without a word: %s", error)
            return
        thread = self._thread
        self._jobs.put(None)
        await asyncio.wait((ended,), timeout=CLOSE_LIMIT_S)
        if not ended.done():
            logger.warning("a call into the store has not come back in %g s: its thread stays behind", CLOSE_LIMIT_S)
        elif thread is not None:
            thread.join(CLOSE_LIMIT_S)  # blocks the loop, but the thread has nothing left to do but return


def _settle(future: asyncio.Future[T], settle: Callable[[Any], None], value: object) -> None:
    if not future.done():
        settle(value)


class GroupStore:
    """The store of one worker, with its thread and the worker's place in the group.

    ``world_size`` is None in an elastic group, where ``rank`` is only the preferred id.
    """

    def __init__(
        self,
        key_values: KeyValues,
        *,
        rank: int | None,
        world_size: int | None,
        thread: StoreThread | None = None,
        reopen: Callable[[float], Awaitable[KeyValues]] | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._thread = thread or StoreThread()
        self._reopen = reopen
        self._key_values = key_values
        self._polls = 0
        self._watched: Access | None = None
        self._watch: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        """An idle connection to the server of the store: it ends when the server does."""

    @property
    def access(self) -> Access:
        """The location of the current store."""
        return self._key_values.access

    @property
    def is_lost(self) -> bool:
        """Whether the store failed, was given up or is closed."""
        return self._key_values.is_lost

    async def run(self, function: Callable[[KeyValues], T], *, limit_s: float | None = None) -> T:
        """Run a function in the store's thread. Raises `RendezvousError` if the store fails or takes too long."""
        limit_s = limit_s or OPERATION_LIMIT_S
        key_values = self._key_values
        try:
            return await self._thread.run(partial(function, key_values), limit_s=limit_s)
        except TimeoutError:
            key_values.is_lost = True  # await hazard: another store may have been found since
            raise RendezvousError(
                f"the store {key_values.access.description} has not answered for {limit_s:g} s: "
                "its host is stopped, or cannot be reached any more"
            ) from None

    async def poll(
        self, function: Callable[[KeyValues], T | None], *, deadline: float, longest_delay_s: float = LONGEST_DELAY_S
    ) -> T | None:
        """Run a function, with growing pauses, until it returns something; None once the deadline has passed."""
        loop = asyncio.get_running_loop()
        delay_s = FIRST_DELAY_S
        while (found := await self.run(function)) is None:
            self._polls += 1
            remaining_s = deadline - loop.time()
            if remaining_s <= 0:
                return None
            await asyncio.sleep(min(delay_s, remaining_s))
            delay_s = min(delay_s * 1.5, longest_delay_s)
        return found

    async def reopen(self, deadline: float) -> bool:
        """Wait for a store where the lost one was; returns False if this kind of store cannot be opened again."""
        if self._reopen is None:
            return False
        await self.run(KeyValues.release)
        operations = self._key_values.operations
        self._key_values = await self._reopen(deadline)
        self._key_values.operations += operations
        return True

    @property
    def can_reopen(self) -> bool:
        """Whether `reopen` can find another store."""
        return self._reopen is not None

    async def pause(self, seconds: float) -> None:
        """Wait this long, or less if the process that serves the store ends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                if not await self._has_host_ended():
                    await asyncio.sleep(seconds)

    async def _has_host_ended(self) -> bool:
        """Wait for the end of the process that serves the store; returns False if it cannot be noticed."""
        access = self.access
        if access.is_host or access.host is None or access.port is None or not self.can_reopen:
            return False
        if self._watched is not access:
            self._close_watch()
            self._watched = access
            with contextlib.suppress(OSError):  # the next operation on the store reports the problem
                self._watch = await asyncio.open_connection(access.host, access.port)
        if self._watch is None:
            return False  # the store still works, or else it would have been lost by now
        with contextlib.suppress(OSError):
            await self._watch[0].read()
        self._close_watch()
        return True

    def _close_watch(self) -> None:
        if self._watch is not None:
            self._watch[1].close()
            self._watch = None

    async def aclose(self) -> None:
        """Drop the store and end its thread. Does not wait for other workers."""
        self._close_watch()
        await self._thread.aclose(self._key_values.release)

    def statistics(self) -> dict[str, int | str]:
        return {
            "store": self.access.description,
            "store_operations": self._key_values.operations,
            "store_polls": self._polls,
            "store_lost": int(self.is_lost),
            "store_host": int(self.access.is_host),
        }
