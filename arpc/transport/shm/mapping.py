"""The memory of an arena: an anonymous file that only this process, and peers that it is offered to, can reach.

It is made by memfd_create, so it vanishes with the last process that has it, however that process ends. Peers open it
through ``/proc/<pid>/fd/<n>``, which requires the same user and the same PID namespace. A random token at its beginning
proves that both sides mean the same file, and so run on the same host.
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

__all__ = ["ArenaFile", "ArenaOffer", "MappedArena", "UnmappableError", "is_supported"]

_NAME: Final = "arpc"
_TOKEN_BYTES: Final = 32
_MOST_PER_WRITE: Final = 1 << 30


def is_supported() -> bool:
    """Whether this system is Linux with memfd_create and file seals."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


class UnmappableError(Exception):
    """An arena of another process cannot be used here. This is no failure: tensors go through the socket then."""


class ArenaOffer(msgspec.Struct, array_like=True, frozen=True):
    """The location of an arena, as its owner sends it to a peer."""

    pid: int
    fd: int
    size_bytes: int
    token: bytes


class _Mapping:
    """A file that is mapped into this process for as long as this object is referred to."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        # This reserves no memory: the file has many more addresses than it will ever have pages
        self._map = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.size_bytes = size_bytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._madvise = cast("Any", ctypes.CDLL(None, use_errno=True)).madvise

    def free(self, offset: int, size_bytes: int) -> None:
        """Free the memory behind a range of pages, in all processes; it then reads as zeros. Raises `OSError`."""
        # Not by `mmap.madvise`, which keeps the interpreter lock meanwhile
        if self._madvise(ctypes.c_void_p(self.address + offset), ctypes.c_size_t(size_bytes), mmap.MADV_REMOVE):
            raise OSError(ctypes.get_errno(), "madvise failed")


class ArenaFile(_Mapping):
    """This worker's own arena."""

    fd = -1

    def __init__(self, size_bytes: int) -> None:
        """Raise `OSError` if the system cannot create or map the file."""
        flags = getattr(os, "MFD_CLOEXEC", 1) | getattr(os, "MFD_ALLOW_SEALING", 2)
        self.fd = os.memfd_create(_NAME, flags)
        try:
            os.ftruncate(self.fd, size_bytes)
            # No process can shrink the file any more: to read beyond its end would kill the reader
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            token = secrets.token_bytes(_TOKEN_BYTES)
            os.pwrite(self.fd, token, 0)
            super().__init__(self.fd, size_bytes)
        except BaseException:
            self.close()
            raise
        self.offer = ArenaOffer(os.getpid(), self.fd, size_bytes, token)

    def copy(self, source: memoryview, offset: int, *, is_warm: bool) -> None:
        """Copy bytes to an offset, without the interpreter lock. Raises `OSError` when there is no memory."""
        if is_warm:
            ctypes.memmove(self.address + offset, address_of(source), source.nbytes)
            return
        # A write to fresh pages takes half as long as page faults, which clear the pages, and a copy. And where memory
        # is short, a write fails, while a page fault would kill this process.
        end = source.nbytes
        position = 0
        while position < end:
            position += os.pwrite(self.fd, source[position : position + _MOST_PER_WRITE], offset + position)

    def reserve(self, offset: int, size_bytes: int) -> None:
        """Allocate memory behind a range. Raises `OSError` if there is none; a page fault would kill the process."""
        os.posix_fallocate(self.fd, offset, size_bytes)

    def close(self) -> None:
        """Close the descriptor. Peers that have mapped the file keep it, and tensors in it here stay valid."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class MappedArena(_Mapping):
    """The arena of a peer."""

    def __init__(self, offer: ArenaOffer) -> None:
        """Raise `UnmappableError` if the file cannot be opened and mapped, or is not the arena that was offered."""
        path = f"/proc/{offer.pid}/fd/{offer.fd}"
        try:
            # On another host, or in another namespace, that may be any file, and to open it could have side effects
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
                raise UnmappableError("it is the arena of another process")
            super().__init__(fd, offer.size_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise UnmappableError(f"{path} cannot be mapped: {error}") from error
        finally:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.token = offer.token

    def free_all_but(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Free all memory outside of these sorted ranges, in all processes. Only after the owner's process ended."""
        start = 0
        for begin, end in [*ranges, (self.size_bytes, self.size_bytes)]:
            stop = begin & -PAGE_BYTES
            if stop > start:
                self.free(start, stop - start)
            start = max(start, -(-end // PAGE_BYTES) * PAGE_BYTES)
