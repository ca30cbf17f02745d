"""Looks over a pickle before it is read: how much memory it may come to, and which of the two readers it is for."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from typing import Final

from arpc.errors import NotAllowedError
from arpc.wire.values.key_costs import MAX_KEYS_ALIKE

__all__ = ["MAX_INTEGER_BYTES", "check_proportion", "needs_careful_reader"]

# -- how much memory a pickle may come to

_COSTS: Final = {
    pickle.EMPTY_SET: 224,
    pickle.FROZENSET: 224,
    pickle.EMPTY_DICT: 72,
    pickle.EMPTY_LIST: 64,
    pickle.REDUCE: 100,
}
"""Bytes that an object takes which is one byte in a pickle, or a few, and the reference to it."""
_DEQUE_BYTES: Final = 760
"""What each call of a pickle costs that names `collections.deque`: an empty one has room for 64 items."""
_ALWAYS_BYTES: Final = 64 << 20
_PROPORTION: Final = 48


def check_proportion(payload: bytes) -> None:
    """Refuse a large pickle of many empty objects."""
    if len(payload) * _COSTS[pickle.EMPTY_SET] < _ALWAYS_BYTES:
        return
    limit = _ALWAYS_BYTES + _PROPORTION * len(payload)
    by_opcode = {**_COSTS, pickle.REDUCE: _DEQUE_BYTES} if b"deque" in payload else _COSTS
    if sum(payload.count(opcode) * cost for opcode, cost in by_opcode.items()) <= limit:
        return
    # there may be texts in it that only look like that
    costs = {opcode[0]: cost for opcode, cost in by_opcode.items()}
    estimate = 0
    for opcode, _ in _opcodes(payload):
        if opcode is not None:
            estimate += costs.get(opcode, 0)
            if estimate > limit:
                raise NotAllowedError(f"a message of {len(payload)} bytes whose objects would take more than {limit}")


# -- which pickles are not for the reader in C

# A pickle can say where in the memo something is put, and how long something is that is not there: room is made for it
_FAR: Final = re.compile(
    rb"r..(?:[^\0].|.[^\0])|p[\s\d_+]{5}|[\x8d\x8e\x96].{4}(?:[^\0]...|.[^\0]..|..[^\0].|...[^\0])"
    rb"|\x8b.(?:[\x04-\xff]..|.[^\0].|..[^\0])",
    re.DOTALL,
)
MAX_INTEGER_BYTES: Final = 1023
"""Python divides large integers in quadratic time, as it does to make a range, and hashes them anew each time."""
_FAR_INDEX: Final = 1 << 16
# how many bytes follow an opcode; or in how many the number of those is told
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
_LONG_BINPUT: Final = b"r"[0]
_LONG4: Final = pickle.LONG4[0]
_STOP: Final = b"."[0]
# What changes an object. A tensor takes some of it for arithmetic, which may take any amount of memory
_CHANGES: Final = (pickle.BUILD, pickle.SETITEM, pickle.SETITEMS, pickle.ADDITEMS)
_CHANGING: Final = frozenset(b"".join(_CHANGES))
# Hashing a tuple in tuples takes stack for each, and Python does not look whether there is any left
_TUPLES: Final = (pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE)
# and so does freeing a slice in slices
_NESTING: Final = (*_TUPLES, pickle.REDUCE, pickle.NEWOBJ, pickle.NEWOBJ_EX, pickle.OBJ, pickle.INST)
# Keys that hash alike are among these: texts, bytes and small integers do not
_ALIKE: Final = (*_NESTING, pickle.LONG1, pickle.LONG4, pickle.FROZENSET)
_GETS: Final = (pickle.BINGET, pickle.LONG_BINGET, pickle.GET, pickle.DUP)
_GET_BYTES: Final = {pickle.BINGET[0]: 1, pickle.LONG_BINGET[0]: 4}
_PUTS: Final = frozenset(pickle.BINPUT + pickle.LONG_BINPUT)
_MEMOIZE: Final = pickle.MEMOIZE[0]
_NO_TUPLES: Final = frozenset(b"XCB]}\x8c\x8d\x8e\x8f\x93\x96")
# and time for each place where one is: twice as much for a tuple with another one in it twice. What is taken from the
# memo is counted, not tuples: a few of them are enough if there is another one many times in each, and one is enough
# if it is long, and a key many times
_MAX_DOUBLED: Final = 20


def needs_careful_reader(payload: bytes, *, has_slots: bool) -> bool:
    """Whether a pickle may ask for more memory or time than it has bytes, change a tensor, or use extension codes."""
    if _has_extension(payload):
        return True
    if len(payload) > MAX_KEYS_ALIKE and _count(payload, _ALIKE) > MAX_KEYS_ALIKE:
        return True
    may_change = has_slots and any(change in payload for change in _CHANGES)
    may_double = _count(payload, _GETS) > _MAX_DOUBLED and any(code in payload for code in _ALIKE)
    if not (may_change or may_double or _FAR.search(payload) is not None):
        return False
    doubled = memoized = 0
    before: int | None = None
    plain: set[int] = set()
    """Where in the memo there is something that is no tuple."""
    for opcode, at in _opcodes(payload):
        if opcode is None or (opcode == _LONG_BINPUT and int.from_bytes(payload[at : at + 4], "little") >= _FAR_INDEX):
            return True
        if opcode == _LONG4 and int.from_bytes(payload[at : at + 4], "little") > MAX_INTEGER_BYTES:
            return True
        if may_change and opcode in _CHANGING:
            return True
        if may_double:
            if opcode == _MEMOIZE:
                if before in _NO_TUPLES:
                    plain.add(memoized)
                memoized += 1
            elif opcode in _PUTS:
                return True  # in no pickle of today
            elif (size := _GET_BYTES.get(opcode)) is not None:
                doubled += int.from_bytes(payload[at : at + size], "little") not in plain
        before = opcode
    return doubled > _MAX_DOUBLED


# Extension codes stand for objects that others have registered. The reader in C does not ask whether it may use them
_EXTENSIONS: Final = (pickle.EXT1, pickle.EXT2, pickle.EXT4)
_COUNTLESS: Final = re.compile(
    rb"(?:[(01NRabeltsud)\]}\x81\x85-\x89\x8f-\x94\x97\x98]|[Kqh\x80].|M..|[Jjr].{4}|[G\x95].{8})*+", re.DOTALL
)
"""Opcodes with arguments of a fixed size, but for STOP."""


def _has_extension(payload: bytes) -> bool:
    """Whether there may be an extension code among the opcodes."""
    if not any(code in payload for code in _EXTENSIONS):
        return False
    at, end = 0, len(payload)
    while True:
        run = _COUNTLESS.match(payload, at)
        at = at if run is None else run.end()
        if at >= end or payload[at] == _STOP:
            return False
        counted = _COUNTED.get(payload[at])
        if counted is None:
            return True
        at += 1
        at += counted + int.from_bytes(payload[at : at + counted], "little")


def _count(payload: bytes, opcodes: tuple[bytes, ...]) -> int:
    return sum(map(payload.count, opcodes))


def _opcodes(payload: bytes) -> Iterator[tuple[int | None, int]]:
    """Each opcode, and where what belongs to it begins; None, at last, where it cannot be told how it goes on."""
    at, end = 0, len(payload)
    while at < end:
        opcode = payload[at]
        at += 1
        if (fixed := _FIXED.get(opcode)) is not None:
            yield opcode, at
            if opcode == _STOP:
                return
            at += fixed
        elif (counted := _COUNTED.get(opcode)) is not None:
            yield opcode, at
            at += counted + int.from_bytes(payload[at : at + counted], "little")
            if at > end:
                yield None, end
        else:
            yield None, at
            return
