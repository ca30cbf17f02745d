"""Changes fields of a peer's message: one to four of them, each to a value that breaks careless arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random
from typing import Any, Final

from scripts.metadata.valid import Input

__all__ = ["lie"]

_POWERS: Final = tuple(1 << bits for bits in (7, 8, 15, 16, 31, 32, 33, 40, 53, 60, 61, 62, 63))
_BOUNDARIES: Final = (
    *range(-3, 10),
    *(15, 16, 17, 24, 31, 32, 63, 64, 65, 127, 128, 129, 255, 256),
    *(power + change for power in _POWERS for change in (-1, 0, 1)),
    (1 << 64) - 1,
    -(1 << 63),
    -(1 << 31),
)
_TEXTS: Final = ("", "cpu", "cuda:0", "meta", *(f"torch.sparse_{name}" for name in ("coo", "csr", "csc", "bsr", "bsc")))
_FLOATS: Final = (0.0, -1.0, float("nan"), float("inf"), 5e-324, 1e308)
_FEW: Final = 4
_BITS: Final = 64


def lie(true: Input, random: Random) -> Input:
    """Return a changed copy of an input. The original stays as it is."""
    content = _copied(true.content)
    if not random.randrange(_FEW) and (pairs := list(_pairs(content))):
        _overflow(*random.choice(pairs), random)
        if random.randrange(2):
            return Input(true.way, content)
    for _ in range(random.choice((1, 1, 2, 2, 3, _FEW))):
        _change(content, random)
    return Input(true.way, content)


def _copied(value: Any) -> Any:
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _change(content: list[Any], random: Random) -> None:
    """Change one field, found by a random descent into the lists."""
    place = content
    while True:
        if not place:
            place.append(random.choice(_BOUNDARIES))
            return
        index = random.randrange(len(place))
        value = place[index]
        if not isinstance(value, list):
            place[index] = _changed(value, random)
            return
        if not random.randrange(6) or not value:
            _change_list(place, index, random)
            return
        place = value


def _change_list(place: list[Any], index: int, random: Random) -> None:
    values: list[Any] = place[index]
    change = random.randrange(4)
    if change == 0 and values:
        del values[random.randrange(len(values))]
    elif change == 1:
        like = random.choice(values) if values else random.choice(_BOUNDARIES)
        values.insert(random.randrange(len(values) + 1), _copied(like))
    elif change == 2:
        place[index] = [random.choice((0, 1, 1, 2))] * random.choice((0, 1, 2, 3, 63, 64, 65))
    else:
        other = random.randrange(len(place))
        place[index], place[other] = place[other], place[index]


def _pairs(values: list[Any]) -> Iterator[tuple[list[Any], list[Any]]]:
    """Yield neighbouring lists with equally many integers: shapes and strides."""
    for left, right in pairwise(values):
        if left and _is_integers(left) and _is_integers(right) and len(left) == len(right):
            yield left, right
    for value in values:
        if isinstance(value, list):
            yield from _pairs(value)


def _is_integers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, int) for item in value)


def _overflow(shape: list[Any], strides: list[Any], random: Random) -> None:
    """Set a size and a stride whose product, times the size of an item, is a small number modulo 2**64 or 2**63."""
    bits = random.randrange(20)
    dimension = random.randrange(len(shape))
    shape[dimension] = (1 << (_BITS - random.randrange(2) - random.randrange(5) - bits)) + random.randrange(3)
    strides[dimension] = 1 << bits


def _changed_int(value: int, random: Random) -> int:
    change = random.randrange(6)
    if change < 3:
        return int(random.choice(_BOUNDARIES))
    if change == 3:
        return value + random.choice((-16, -1, 1, 16))
    return value * 2 if change == 4 else random.randrange(-8, 256)


def _changed_bytes(value: bytes, random: Random) -> bytes:
    changed = bytearray(value)
    change = random.randrange(5)
    if change == 0 or not changed:
        return bytes(changed[: random.randrange(len(changed) + 1)]) if random.randrange(2) else value + bytes(8)
    if change == 1 and len(changed) >= 8:  # a number, such as an index
        start = random.randrange(len(changed) // 8) * 8
        changed[start : start + 8] = (random.choice(_BOUNDARIES) % (1 << _BITS)).to_bytes(8, "little")
    else:
        for _ in range(random.randrange(1, _FEW)):
            changed[random.randrange(len(changed))] = random.choice(
                (0, 1, 7, 64, 127, 128, 129, 255, random.randrange(256))
            )
    return bytes(changed)


def _changed_text(_: str, random: Random) -> str:
    return random.choice(_TEXTS)


def _changed_float(value: float, random: Random) -> float:
    return random.choice((*_FLOATS, value * 2))


_BY_TYPE: Final[dict[type, Callable[[Any, Random], Any]]] = {
    int: _changed_int,
    bool: _changed_int,
    bytes: _changed_bytes,
    str: _changed_text,
    float: _changed_float,
}


def _changed(value: Any, random: Random) -> Any:
    if not random.randrange(40):  # a value of another type
        return random.choice((0, b"", "", True, -1, [], 0.5))
    return _BY_TYPE[type(value)](value, random)
