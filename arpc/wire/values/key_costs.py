"""What hashing and comparing the keys of a pickle's dicts and sets costs, and a limit for it.

Python hashes a tuple anew each time that it becomes a key, and compares a new key with every key that has the same
hash. Texts and bytes have a secret seed in their hashes; of numbers and tuples anyone can make as many as he likes that
hash alike. A dict of 20,000 such keys takes seconds, and so does one long tuple that is a key 20,000 times.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from arpc.errors import NotAllowedError

__all__ = ["MAX_KEYS_ALIKE", "KeyCosts"]

MAX_KEYS_ALIKE: Final = 3000
"""As many keys as may be alike in one message: they take about a tenth of a second."""
_MAX_COMPARED: Final = MAX_KEYS_ALIKE**2 // 2
_MAX_HASHED: Final = 1 << 22
"""Items of tuples that may be hashed for one message."""
_DISTINCT: Final = frozenset((str, bytes, float, bool, type(None)))
"""Types of keys of which few have one hash, whatever a peer sends."""
_MODULUS: Final = (1 << 61) - 1
"""Smaller integers are their own hash."""


class KeyCosts:
    """Counts for one pickle. Raises `NotAllowedError` before the keys that are too many are used."""

    __slots__ = ("_alike", "_compared", "_hashed")

    def __init__(self) -> None:
        self._alike: dict[int, tuple[Any, dict[int, int]]] = {}
        """By the id of a container: the container, so that no other gets that id, and how many of its keys have each
        hash."""
        self._compared = 0
        self._hashed = 0

    def hash(self, size: int) -> None:
        """A tuple with so many items in it, those of tuples in it included, is hashed."""
        self._hashed += size
        if self._hashed > _MAX_HASHED:
            raise NotAllowedError(
                "a message with long tuples as keys, in so many places that hashing them takes seconds"
            )

    def add(self, container: Any, keys: Iterable[Any]) -> None:
        """Keys are about to be put into a dict or a set. Raises what hashing one raises, too."""
        for key in keys:
            kind = type(key)
            if kind in _DISTINCT or (kind is int and -_MODULUS < key < _MODULUS):
                continue
            alike = self._alike.setdefault(id(container), (container, {}))[1]
            hashed = hash(key)
            before = alike.get(hashed, 0)
            alike[hashed] = before + 1
            self._compared += before
            if self._compared > _MAX_COMPARED:
                raise NotAllowedError("a message with so many keys of the same hash that comparing them takes seconds")
