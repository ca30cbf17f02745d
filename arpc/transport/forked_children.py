"""Descriptors of workers that a forked child must not keep open.

A child that a handler forks, such as a worker process of a DataLoader, has a copy of every descriptor of its parent.
While it lives, a connection does not end when the parent dies, and an address stays taken: peers would notice the death
by the missing heartbeat only. So the child replaces these descriptors by ``/dev/null``, as soon as it is forked.

It replaces them, and does not close them, because objects of the child that own a descriptor may close it later, and
the number must not belong to another file then. The peer does not notice anything: there is neither a ``shutdown`` of
the socket, which would end the parent's connection, nor a GOODBYE.

Programs that are started by ``exec`` need none of this: ``exec`` closes every descriptor here. Nor do descriptors whose
end no peer waits for: timers, eventfds, and the file of shared memory, from which a child may read tensors.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Final

__all__ = ["close_in_children", "close_port_in_children", "leave_port_to_children"]

_ALL: Final = "/dev/fd"
"""The directory that lists the descriptors of this process, on Linux and on macOS."""

_withheld: Final[dict[int, tuple[int, int]]] = {}
"""The file behind each descriptor. An entry may outlive its descriptor, whose number may then have another file."""
_ports: Final[Counter[int]] = Counter()


def close_in_children(descriptor: int) -> None:
    """Keep the socket, or file with an inode of its own, that a descriptor stands for now out of forked children.

    Nothing has to be undone when the descriptor is closed.
    """
    _withheld[descriptor] = _file_of(descriptor)


def close_port_in_children(port: int) -> None:
    """Keep all sockets that are bound to a TCP port out of forked children: the listening one, and all it accepted.

    For servers whose sockets Python code cannot get. Call `leave_port_to_children` when the server ends.
    """
    _ports[port] += 1


def leave_port_to_children(port: int) -> None:
    """Undo one `close_port_in_children`: its server has ended, and another socket may have the port now."""
    _ports[port] -= 1
    if _ports[port] <= 0:
        del _ports[port]


def _file_of(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _is_withheld(descriptor: int) -> bool:
    try:
        if _withheld.get(descriptor) == _file_of(descriptor):
            return True
        return bool(_ports) and _local_port(descriptor) in _ports
    except OSError:
        return False  # it was closed


def _local_port(descriptor: int) -> int | None:
    with contextlib.suppress(OSError):  # it is no socket
        sock = socket.socket(fileno=descriptor)
        try:
            if sock.family in {socket.AF_INET, socket.AF_INET6} and sock.type == socket.SOCK_STREAM:
                port: int = sock.getsockname()[1]
                return port
        finally:
            sock.detach()
    return None


def _candidates() -> Iterator[int]:
    yield from list(_withheld)
    if _ports:
        with contextlib.suppress(OSError):  # there is no such list: descriptors that were not registered stay open
            yield from [int(name) for name in os.listdir(_ALL) if name.isdecimal()]  # noqa: PTH208 - names suffice


def _forked() -> None:
    """Replace the parent's descriptors, in a child that was just forked."""
    try:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return  # no descriptor is left
    try:
        for descriptor in _candidates():
            if descriptor != nothing and _is_withheld(descriptor):
                with contextlib.suppress(OSError):
                    os.dup2(nothing, descriptor, inheritable=False)
    finally:
        os.close(nothing)
        _withheld.clear()
        _ports.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
