"""The state of a worker after the load has ended: tables that must be empty, and tables that must be bounded."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Collection, Iterator
from operator import attrgetter
from types import CodeType
from typing import Any, Final

import arpc
from arpc.batching.decorator import Queues
from arpc.runtime import current

__all__ = ["EMPTY_TABLES", "VISITOR", "holders", "remains", "table", "too_large"]

EMPTY_TABLES: Final = (
    "rref_context.forks.users",
    "rref_context.forks.owned",
    "rref_context.forks.offers",
    "rref_context._answers",
    "rref_context._ends",
    "rref_context.post._dropped",
    "rref_context.inquiries.due",
    "rref_context.post._waiting",
    "rref_context.post._sending",
    "autograd.container.contexts",
)
"""Attributes of a worker that are empty when no call is in flight and no RRef is held."""

VISITOR: Final = "visitor"
"""The prefix of worker names that are used once, and never come back."""

_MAX_PEERS: Final = 1024
"""The most keys of departed peers: a peer takes kilobytes, so only some hundreds may be kept; each has two keys."""
_MAX_NAMES: Final = 5000
"""The most departed names in tables of small entries: the runtime keeps up to 4,096 of them."""
_MAX_ENTRIES: Final = 20_000
"""The most entries of any table of an idle worker, whatever they are."""
_WALK_DEPTH: Final = 6
_SHOWN: Final = 300
_HOLDERS: Final = 10
_WAYS: Final = 12
_RREFS: Final = 20


def table(worker: arpc.Worker, path: str) -> Collection[Any]:
    """Return a table of a worker, by the path of its attributes."""
    found: Collection[Any] = attrgetter(path)(worker)
    return found


async def remains() -> dict[str, dict[str, Any]]:
    """Called by the runner: return state that should be gone (``left``), and the sizes of large tables (``tables``)."""
    gc.collect()  # an error that is referenced, by a future for example, keeps the frames that it passed through
    worker = current()
    return {"left": {what: value for what, value in _left(worker) if value}, "tables": _large_tables(worker)}


def _left(worker: arpc.Worker) -> Iterator[tuple[str, Any]]:
    for path in EMPTY_TABLES:
        yield path, [_short(entry) for entry in _entries(table(worker, path))]
    rrefs = worker.rrefs()
    yield "rrefs", [str(row) for row in rrefs]
    yield "expected values", [str(row) for row in rrefs if row.state == "expected"]
    yield "pending creations", [str(row) for row in rrefs if row.state in {"creating", "requested"}]
    yield "holders of RRefs", list(holders()) if rrefs else []
    yield "batches", [_short(key) for key in worker.keep(Queues).queues]
    statistics = worker.statistics()
    peers = {name: peer for name, peer in statistics["peers"].items() if name.startswith("worker")}
    for what in ("calls_in_flight", "calls_waiting", "bytes_in_flight"):
        yield what, {name: peer[what] for name, peer in peers.items() if peer[what]}
    yield "requests", [_short(run) for run in _requests(worker)]
    autograd = statistics["autograd"]
    yield "autograd", {what: autograd[what] for what in ("passes", "sends", "recvs") if autograd[what]}
    memory = statistics["shared_memory"]
    yield "lent_bytes", {name: size for name, size in memory.get("lent_bytes", {}).items() if size}
    yield "shared_blocks", memory.get("shared_blocks", 0)


def _requests(worker: arpc.Worker) -> Iterator[Any]:
    """Yield handlers and streams that run for workers of the load, and their waiting requests."""
    for link in worker.agent.connector._links.values():  # noqa: SLF001 - nothing public has them
        if link.caller.name.startswith("worker"):
            yield from link.running.values()
            yield from link.waiting.values()


def holders() -> Iterator[str]:
    """Yield the chains of references to each RRef object of this process, from the object outwards."""
    # by its type: `isinstance` reads the class of objects, and some objects of torch warn at any attribute access
    found = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), arpc.RRef)]
    del found[_RREFS:]
    for rref in found:
        for chain in _chains(rref, [found]):
            yield f"{rref!r} < {' < '.join(map(_kind, chain))}"


def _chains(held: Any, ignored: list[Any]) -> list[list[Any]]:
    """Return the chains of references to an object, each from its holder outwards, up to `_HOLDERS` objects.

    An object without a holder here is held by an object that the garbage collector does not see: a running frame, or an
    object from before `gc.freeze`.
    """
    ways: list[list[Any]] = [[held]]
    seen: dict[int, Any] = {id(held): held}
    ended: list[list[Any]] = []
    for _ in range(_HOLDERS):
        following: list[list[Any]] = []
        for way in ways:
            # the objects of this search refer to what it finds as well
            own = [ways, seen, ended, following, ignored, *ignored, *ways, *ended, *following]
            outer = _referrers(way[-1], {*seen, *map(id, own), id(own)})
            seen |= {id(one): one for one in outer}
            following += [[*way, one] for one in outer]
            if not outer:
                ended.append(way)
            del outer
        ways = following[:_WAYS]
    return [way[1:] for way in (*ended, *ways)]


def _referrers(held: Any, known: set[int]) -> list[Any]:
    """Return the objects that refer to an object, except those with known ids and the frames of this search."""
    return [one for one in gc.get_referrers(held) if id(one) not in known and _code(one) not in _SEARCH]


def _code(holder: Any) -> CodeType | None:
    """Return the code of a frame or a generator."""
    code: CodeType | None = getattr(holder, "f_code", None) or getattr(holder, "gi_code", None)
    return code


def _kind(holder: Any) -> str:
    """Describe an object: a frame by its function, a coroutine by its name, any other object by its type."""
    code = getattr(holder, "f_code", None)
    return (
        f"frame of {code.co_qualname}" if code is not None else getattr(holder, "__qualname__", type(holder).__name__)
    )


_SEARCH: Final = {function.__code__ for function in (_chains, _referrers, holders, _left)}
"""The functions of this search, whose frames refer to all objects that it finds."""


def _entries(found: Collection[Any]) -> list[Any]:
    return list(found.items() if isinstance(found, dict) else found)


def _short(entry: Any) -> str:
    try:
        return repr(entry)[:_SHOWN]
    except Exception as error:  # noqa: BLE001 - values may be errors that cannot be formatted
        return f"{type(entry).__name__}, whose text cannot be made ({type(error).__name__})"


# -- bounded tables


def _large_tables(worker: arpc.Worker) -> dict[str, int]:
    """Return the tables with many entries or with names of departed workers, by ``Class.attribute``."""
    found: dict[str, int] = {}
    for name, entries in _walk(worker):
        departed = sum(_is_departed(entry) for entry in entries)
        if departed:
            found[f"{name} (departed)"] = max(departed, found.get(f"{name} (departed)", 0))
        if len(entries) > _MAX_NAMES:
            found[name] = max(len(entries), found.get(name, 0))
    return found


def _is_departed(key: Any) -> bool:
    if isinstance(key, str):
        return key.startswith(VISITOR)
    if isinstance(key, tuple):
        return any(isinstance(part, str) and part.startswith(VISITOR) for part in key)
    return False


def _walk(worker: arpc.Worker) -> Iterator[tuple[str, Collection[Any]]]:
    """Yield all tables that are attributes of the worker's own objects."""
    seen: set[int] = set()
    level: list[Any] = [worker]
    for _ in range(_WALK_DEPTH):
        following: list[Any] = []
        for owner in level:
            for name, value in _attributes(owner):
                if id(value) in seen:
                    continue
                seen.add(id(value))
                if isinstance(value, dict | set | list | deque):
                    yield f"{type(owner).__name__}.{name}", value
                elif type(value).__module__.startswith("arpc."):
                    following.append(value)
        level = following


def _attributes(owner: Any) -> list[tuple[str, Any]]:
    names = dict.fromkeys(getattr(owner, "__dict__", ()))
    for cls in type(owner).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names |= dict.fromkeys((slots,) if isinstance(slots, str) else slots)
    return [(name, value) for name in names if (value := getattr(owner, name, None)) is not None]


def too_large(tables: dict[str, int]) -> dict[str, int]:
    """Return the tables that have more entries than a worker may keep."""
    return {name: size for name, size in tables.items() if size > _limit(name)}


def _limit(name: str) -> int:
    if not name.endswith("(departed)"):
        return _MAX_ENTRIES
    return _MAX_PEERS if "_peers" in name else _MAX_NAMES
