"""Limits for the cost of reading a pickle: `needs_careful_reader` scans it before, `ReadingCosts` counts meanwhile.

A pickle can cost memory or time out of proportion to its size. An empty set is one byte in it. Python hashes a tuple
anew each time that it becomes a key, takes stack for each tuple in a tuple meanwhile, and compares a new key with every
key that has the same hash. The hashes of texts and bytes have a secret seed, but an attacker can make any number of
numbers and tuples with the same hash. A dict of 20,000 such keys takes seconds, and so does one long tuple that is a
key 20,000 times.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from arpc.errors import NotAllowedError
from arpc.wire.values.reducers import SPELLED_OUT

__all__ = ["MAX_INTEGER_BYTES", "ReadingCosts", "check_proportion", "needs_careful_reader"]

MAX_INTEGER_BYTES: Final = 1023
"""Python divides large integers in quadratic time, when it makes a range for instance, and does not cache hashes."""
_MAX_KEYS_ALIKE: Final = 3000
"""The most keys with the same hash in one message: they take about a tenth of a second."""

# -- the memory that a pickle may take

_COSTS: Final = {
    pickle.EMPTY_SET: 224,
    pickle.FROZENSET: 224,
    pickle.EMPTY_DICT: 72,
    pickle.EMPTY_LIST: 64,
    pickle.REDUCE: 100,
}
"""The memory of an object that is one byte in a pickle, or a few, with the reference to it, in bytes."""
_DEQUE_BYTES: Final = 760
"""The cost of each call in a pickle that names `collections.deque`: an empty one has room for 64 items."""
_ALWAYS_BYTES: Final = 64 << 20
_PROPORTION: Final = 48


def check_proportion(payload: bytes) -> None:
    """Refuse a large pickle of many empty objects. Raises `NotAllowedError`."""
    if len(payload) * _COSTS[pickle.EMPTY_SET] < _ALWAYS_BYTES:
        return
    limit = _ALWAYS_BYTES + _PROPORTION * len(payload)
    by_opcode = {**_COSTS, pickle.REDUCE: _DEQUE_BYTES} if b"deque" in payload else _COSTS
    if sum(payload.count(opcode) * cost for opcode, cost in by_opcode.items()) <= limit:
        return
    # the bytes that were counted may be those of texts: now count opcodes only
    costs = {opcode[0]: cost for opcode, cost in by_opcode.items()}
    estimate = 0
    for opcode, _ in _opcodes(payload):
        estimate += 0 if opcode is None else costs.get(opcode, 0)
        if estimate > limit:
            raise NotAllowedError(f"a message of {len(payload)} bytes whose objects would take more than {limit}")


# -- which pickles are not for the reader in C

# Extension codes stand for objects that other libraries have registered. The reader in C uses them without a check
_EXTENSIONS: Final = pickle.EXT1 + pickle.EXT2 + pickle.EXT4
# A pickle can have a far position in the memo, or the length of data that it lacks: memory for these is allocated first
_FAR: Final = re.compile(
    rb"r..(?:[^\0].|.[^\0])|p[\s\d_+]{5}|[\x8d\x8e\x96].{4}(?:[^\0]...|.[^\0]..|..[^\0].|...[^\0])"
    rb"|\x8b.(?:[\x04-\xff]..|.[^\0].|..[^\0])",
    re.DOTALL,
)
_FAR_INDEX: Final = 1 << 16
_LONG_BINPUT: Final = pickle.LONG_BINPUT[0]
_LONG4: Final = pickle.LONG4[0]
# Opcodes that change an object. For a tensor or an array some of them are arithmetic, which may take any amount of
# memory, and so may the items of a list that a slice stands for. Bytes under an array were checked, and must stay
_CHANGES: Final = pickle.BUILD + pickle.SETITEM + pickle.SETITEMS + pickle.ADDITEMS
# `FILL`, which makes arrays, is the first object in the memo of a pickle that begins as usual; any other names it
_FIRST_OF_MEMO: Final = (pickle.BINGET + b"\0", pickle.LONG_BINGET + b"\0\0\0\0")
_FIRST_AS_TEXT: Final = re.compile(rb"g[\s+\-0_]*\n")
_FILL_NAME: Final = b"_fill"
# Two opcodes of old protocols can spell a name with escapes, so that its bytes are not in the pickle
_SPELLINGS: Final = pickle.UNICODE + pickle.STRING
# Opcodes of keys that may have the same hash, which texts, bytes and small integers do not. Hashing a tuple in tuples
# takes stack for each, and Python does not check whether any is left; so does freeing a slice in slices
_ALIKE: Final = (
    (pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3 + pickle.TUPLE)
    + (pickle.REDUCE + pickle.NEWOBJ + pickle.NEWOBJ_EX + pickle.OBJ + pickle.INST)
    + (pickle.LONG1 + pickle.LONG4 + pickle.FROZENSET)
)
# Hashing takes time for each place where a tuple is: twice as much for a tuple with another one in it twice. Reads of
# the memo are counted, not tuples: a few tuples are enough if each contains another one many times, and one is enough
# if it is long, and a key many times
_MAX_DOUBLED: Final = 20
_GETS: Final = pickle.BINGET + pickle.LONG_BINGET + pickle.GET + pickle.DUP
_GET_BYTES: Final = {pickle.BINGET[0]: 1, pickle.LONG_BINGET[0]: 4}
_PUTS: Final = frozenset(pickle.BINPUT + pickle.LONG_BINPUT)
_MEMOIZE: Final = pickle.MEMOIZE[0]
_NO_TUPLES: Final = frozenset(b"XCB]}\x8c\x8d\x8e\x8f\x93\x96")


def needs_careful_reader(payload: bytes, *, has_slots: bool) -> bool:
    """Whether a pickle may cost memory or time out of proportion, change a tensor or array, or hide its names."""
    if len(payload) > _MAX_KEYS_ALIKE and sum(map(payload.count, _ALIKE)) > _MAX_KEYS_ALIKE:
        return True
    may_change = any(change in payload for change in _CHANGES) and (has_slots or _may_make_changeable(payload))
    may_double = sum(map(payload.count, _GETS)) > _MAX_DOUBLED and any(code in payload for code in _ALIKE)
    may_extend = any(code in payload for code in _EXTENSIONS)
    may_spell = b"\\" in payload and any(code in payload for code in _SPELLINGS)
    if not (may_extend or may_spell or may_change or may_double or _FAR.search(payload) is not None):
        return False
    # the bytes found may be those of texts and numbers: now check opcodes only
    doubled = memoized = 0
    before: int | None = None
    plain: set[int] = set()
    """The positions in the memo of objects that are no tuples."""
    for opcode, at in _opcodes(payload):
        if opcode is None or (opcode == _LONG_BINPUT and int.from_bytes(payload[at : at + 4], "little") >= _FAR_INDEX):
            return True
        if opcode == _LONG4 and int.from_bytes(payload[at : at + 4], "little") > MAX_INTEGER_BYTES:
            return True
        if may_change and opcode in _CHANGES:
            return True
        if may_double:
            if opcode == _MEMOIZE:
                if before in _NO_TUPLES:
                    plain.add(memoized)
                memoized += 1
            elif opcode in _PUTS:
                return True  # today's picklers do not write these
            elif (size := _GET_BYTES.get(opcode)) is not None:
                doubled += int.from_bytes(payload[at : at + size], "little") not in plain
        before = opcode
    return doubled > _MAX_DOUBLED


def _may_make_changeable(payload: bytes) -> bool:
    """Whether a pickle without slots may make an array, or a slice, which changes many items of a list at once."""
    after_prefix = len(SPELLED_OUT) if payload.startswith(SPELLED_OUT) else 0
    return (
        any(get in payload for get in _FIRST_OF_MEMO)
        or payload.find(_FILL_NAME, after_prefix) >= 0
        or b"slice" in payload
        or _FIRST_AS_TEXT.search(payload) is not None
    )


_NUMBERS: Final = re.compile(rb"(?:[N\x88\x89]|K.|M..|J.{4}|G.{8})*+", re.DOTALL)
"""Any number of opcodes that push None, a bool, an int or a float, which are skipped together."""
# the number of bytes after an opcode; or the size of the field that has this number
_FIXED: Final = {
    **dict.fromkeys(b"(.01NRabeltsud)]}\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94\x97\x98", 0),
    **dict.fromkeys(b"Kqh\x80", 1),
    **dict.fromkeys(b"M", 2),
    **dict.fromkeys(b"Jjr", 4),
    **dict.fromkeys(b"G\x95", 8),
}
_COUNTED: Final = {
    **dict.fromkeys(b"CU\x8c\x8a", 1),
    **dict.fromkeys(b"BTX\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
_STOP: Final = pickle.STOP[0]


def _opcodes(payload: bytes) -> Iterator[tuple[int | None, int]]:
    """Yield each opcode but those of `_NUMBERS`, and the position of its argument.

    Yields None at the end if there is no STOP: the pickle has an extension code, another unknown opcode, or is cut off.
    """
    at, end = 0, len(payload)
    while at < end:
        if (numbers := _NUMBERS.match(payload, at)) is not None and (at := numbers.end()) >= end:
            break
        opcode = payload[at]
        at += 1
        if (counted := _COUNTED.get(opcode)) is not None:
            size = counted + int.from_bytes(payload[at : at + counted], "little")
        elif (size := _FIXED.get(opcode, -1)) < 0:
            break
        yield opcode, at
        if opcode == _STOP:
            return
        at += size
    yield None, end


# -- the cost of the keys of dicts and sets

_MAX_COMPARED: Final = _MAX_KEYS_ALIKE**2 // 2
_MAX_HASHED: Final = 1 << 22
"""The most items of tuples that are hashed for one message."""
_MAX_NESTED: Final = 1000
"""The deepest nesting of tuples: hashing one takes stack for each, and Python does not check whether any is left."""
_MAX_PLACES: Final = 1 << 22
"""The most places of tuples in one tuple: hashing it takes time for each, and so does comparing it."""
_DISTINCT: Final = frozenset((str, bytes, float, bool, type(None)))
"""Types of keys of which few have the same hash, whatever a peer sends."""
_MODULUS: Final = (1 << 61) - 1
"""Smaller integers are their own hash."""


class ReadingCosts:
    """The counters for one pickle. Methods raise `NotAllowedError` before an object that costs too much is used."""

    __slots__ = ("_alike", "_compared", "_hashed", "_nesting")

    def __init__(self) -> None:
        self._nesting: dict[int, tuple[int, int, int]] = {}
        """By the id of a tuple or frozenset: the depth of nested ones in it, the number of their places, and the number
        of items in all of them. An object that gets the id of a freed one replaces its entry."""
        self._alike: dict[int, tuple[Any, dict[int, int]]] = {}
        """By the id of a container: the container, so that no other gets that id, and the number of its keys with each
        hash."""
        self._compared = 0
        self._hashed = 0

    def made(self, obj: Any) -> None:
        """Count an object that was made, if it can contain others of its kind."""
        if isinstance(obj, tuple | frozenset):
            items: Iterable[Any] = obj
        elif isinstance(obj, BaseExceptionGroup):
            items = obj.exceptions
        elif type(obj) is slice:
            items = (obj.start, obj.stop, obj.step)
        else:
            return
        nesting = self._nesting
        depth, places, size = 0, 1, 0
        for item in items:
            size += 1
            if isinstance(item, tuple | frozenset | slice | BaseExceptionGroup):
                inner_depth, inner_places, inner_size = nesting.get(id(item), (0, 0, 0))
                depth = max(depth, inner_depth)
                places += inner_places
                size += inner_size
        if depth >= _MAX_NESTED or places > _MAX_PLACES:
            raise NotAllowedError(
                f"a message with more than {_MAX_NESTED} tuples inside each other, or one in too many places"
            )
        nesting[id(obj)] = depth + 1, places, size

    def add_keys(self, container: Any, keys: Iterable[Any]) -> None:
        """Count keys before they are put into a dict or a set. Also raises any error of hashing one."""
        for key in keys:
            kind = type(key)
            if kind in _DISTINCT or (kind is int and -_MODULUS < key < _MODULUS):
                continue
            if isinstance(key, tuple | frozenset):
                self._hashed += self._nesting.get(id(key), (0, 0, 0))[2]
                if self._hashed > _MAX_HASHED:
                    raise NotAllowedError(
                        "a message with long tuples as keys, in so many places that hashing them takes seconds"
                    )
            alike = self._alike.setdefault(id(container), (container, {}))[1]
            hashed = hash(key)
            before = alike.get(hashed, 0)
            alike[hashed] = before + 1
            self._compared += before
            if self._compared > _MAX_COMPARED:
                raise NotAllowedError("a message with so many keys of the same hash that comparing them takes seconds")
