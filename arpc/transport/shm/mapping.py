"""The memory itself: a file that only this process and those who are told of it can reach, and that has no name.

It is made by memfd_create, so it vanishes with the last process that has it, however that one ends. Others open it
through ``/proc/<pid>/fd/<n>``, which takes the same user, and a common view of processes. That both talk of the same
file, and so live on the same host, is shown by a random token at its beginning.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from arpc.transport.shm.blocks import PAGE_BYTES
from arpc.wire.values.raw_memory import address_of

if sys.platform != "win32":
    import fcntl

__all__ = ["ArenaFile", "MappedArena", "Offer", "UnmappableError", "is_supported"]

_NAME: Final = "arpc"
_TOKEN_BYTES: Final = 32
_MOST_PER_WRITE: Final = 1 << 30


def is_supported() -> bool:
    """Whether this system has what it takes."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


class UnmappableError(Exception):
    """An arena of another process cannot be used here. Nobody's fault: bytes go through the socket then."""


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """Where an arena is, in the words of its owner."""

    pid: int
    fd: int
    size_bytes: int
    token: bytes


class _Mapping:
    """A file as memory of this process, for as long as anyone refers to it."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        # No memory is set aside for it: the file has many more addresses than it will ever have pages
        self._map = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.size_bytes = size_bytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._madvise = cast("Any", ctypes.CDLL(None, use_errno=True)).madvise

    def free(self, offset: int, size_bytes: int) -> None:
        """Free the memory behind a range of pages, for everybody; it reads as zeros from then on."""
        # Not by `mmap.madvise`, which keeps the interpreter busy meanwhile
        if self._madvise(ctypes.c_void_p(self.address + offset), ctypes.c_size_t(size_bytes), mmap.MADV_REMOVE):
            raise OSError(ctypes.get_errno(), "madvise failed")


class ArenaFile(_Mapping):
    """This worker's own arena."""

    fd = -1

    def __init__(self, size_bytes: int) -> None:
        """Raise `OSError` if there can be none."""
        flags = getattr(os, "MFD_CLOEXEC", 1) | getattr(os, "MFD_ALLOW_SEALING", 2)
        self.fd = os.memfd_create(_NAME, flags)
        try:
            os.ftruncate(self.fd, size_bytes)
            # Nobody can take addresses away any more: to read there would kill the reader
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            token = secrets.token_bytes(_TOKEN_BYTES)
            os.pwrite(self.fd, token, 0)
            super().__init__(self.fd, size_bytes)
        except BaseException:
            self.close()
            raise
        self.offer = Offer(os.getpid(), self.fd, size_bytes, token)

    def copy(self, source: memoryview, offset: int, *, is_warm: bool) -> None:
        """Put bytes there. The interpreter is free meanwhile. Raises `OSError` when there is no memory."""
        if is_warm:
            ctypes.memmove(self.address + offset, address_of(source), source.nbytes)
            return
        # The kernel fills fresh pages in half the time it takes to clear them, have them touched and fill them. And
        # where memory is short a write fails, while a touch would kill this process.
        end = source.nbytes
        position = 0
        while position < end:
            position += os.pwrite(self.fd, source[position : position + _MOST_PER_WRITE], offset + position)

    def reserve(self, offset: int, size_bytes: int) -> None:
        """Have memory behind a range. Raises `OSError` when there is none, where a touch would kill this process."""
        os.posix_fallocate(self.fd, offset, size_bytes)

    def close(self) -> None:
        """Take part no more. Those who have mapped it keep it, and so does what lies in it here."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class MappedArena(_Mapping):
    """The arena of a peer."""

    def __init__(self, offer: Offer) -> None:
        """Raise `UnmappableError` if it is not to be had, or is not what it should be."""
        path = f"/proc/{offer.pid}/fd/{offer.fd}"
        try:
            # On another host, or in another namespace, that may be anything, and opening it could do something
            if not str(Path(path).readlink()).startswith(f"/memfd:{_NAME}"):
                raise UnmappableError(f"{path} is not an arena")
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise UnmappableError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if not seals & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size != offer.size_bytes:
                raise UnmappableError("it could shrink, and reading it would kill the reader")
            found = os.pread(fd, _TOKEN_BYTES, 0)
            if len(offer.token) != _TOKEN_BYTES or not secrets.compare_digest(found, offer.token):
                raise UnmappableError("it is the arena of somebody else")
            super().__init__(fd, offer.size_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise UnmappableError(f"{path} cannot be mapped: {error}") from error
        finally:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.token = offer.token

    def free_all_but(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Free the memory behind all else, for everybody. The ranges are in order. Only when the owner is no more."""
        start = 0
        for begin, end in [*ranges, (self.size_bytes, self.size_bytes)]:
            stop = begin & -PAGE_BYTES
            if stop > start:
                self.free(start, stop - start)
            start = max(start, -(-end // PAGE_BYTES) * PAGE_BYTES)
