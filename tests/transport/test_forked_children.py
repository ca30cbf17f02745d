"""What a forked child has of its parent's sockets: nothing, and without a word to the peer."""

from __future__ import annotations

import gc
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from arpc.transport.forked_children import close_in_children, close_port_in_children, leave_port_to_children

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="takes fork")


def in_child(function: Callable[[], object]) -> str:
    """What a function returns in a forked child."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = str(function())
        except BaseException as error:  # noqa: BLE001 - told to the parent
            text = repr(error)
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def is_socket(descriptor: int) -> bool:
    return stat.S_ISSOCK(os.fstat(descriptor).st_mode)


def test_a_child_has_no_socket_that_is_withheld():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        close_in_children(ours.fileno())
        assert in_child(lambda: (is_socket(ours.fileno()), is_socket(theirs.fileno()))) == "(False, True)"
        assert is_socket(ours.fileno())
        ours.send(b"the parent's goes on")
        assert theirs.recv(100) == b"the parent's goes on"


def test_an_owner_in_the_child_closes_nothing_but_its_own():
    """The number stays taken, so a socket object that is closed late cannot close another file."""
    ours, theirs = socket.socketpair()
    with theirs:
        close_in_children(ours.fileno())

        def open_then_close_late() -> bool:
            with Path(os.devnull).open("rb") as opened:
                assert opened.fileno() != ours.fileno()
                ours.close()
                gc.collect()
                return opened.read() == b""

        assert in_child(open_then_close_late) == "True"
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):  # neither a byte nor the end of the connection
            theirs.recv(1)
        ours.close()
        assert theirs.recv(1) == b""


def test_a_descriptor_that_has_another_file_now_is_left_to_the_child(tmp_path):
    ours, theirs = socket.socketpair()
    number = ours.fileno()
    close_in_children(number)
    path = tmp_path / "file"
    path.write_text("of the child, too")
    with theirs, path.open("rb") as opened:
        os.dup2(opened.fileno(), number)
        assert in_child(lambda: os.pread(number, 100, 0)) == "b'of the child, too'"
        ours.close()
        assert in_child(lambda: is_socket(theirs.fileno())) == "True"


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_child_has_no_socket_of_a_port_that_is_withheld(family: socket.AddressFamily):
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip("there is no such address here")
    port = server.getsockname()[1]
    with server, socket.create_connection((host, port)) as client, server.accept()[0] as accepted:
        sockets = (server, accepted, client)
        close_port_in_children(port)
        close_port_in_children(port)
        assert in_child(lambda: [is_socket(sock.fileno()) for sock in sockets]) == "[False, False, True]"
        leave_port_to_children(port)
        assert in_child(lambda: [is_socket(sock.fileno()) for sock in sockets]) == "[False, False, True]"
        leave_port_to_children(port)
        assert in_child(lambda: [is_socket(sock.fileno()) for sock in sockets]) == "[True, True, True]"


def test_a_grandchild_may_withhold_for_itself():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        close_in_children(ours.fileno())

        def make_own() -> str:
            mine, yours = socket.socketpair()
            close_in_children(mine.fileno())
            return in_child(lambda: (is_socket(mine.fileno()), is_socket(yours.fileno())))

        assert in_child(make_own) == "(False, True)"
