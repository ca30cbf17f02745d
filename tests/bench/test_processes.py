from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

from arpc.bench.processes import family, kill_family

# A child that starts another, says its pid and waits; that one leaves its session, as a daemon does.
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session={apart})
print(child.pid, flush=True)
input()
"""


def start(*, apart: bool) -> tuple[subprocess.Popen[str], int]:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(apart=apart)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


def end(parent: subprocess.Popen[str], child: int) -> None:
    kill_family([parent.pid, child])
    parent.communicate()


def test_a_family_has_children_that_went_their_own_way() -> None:
    parent, child = start(apart=True)
    try:
        assert family([parent.pid]) == {parent.pid, child}
        assert os.getpid() not in family([parent.pid])
    finally:
        end(parent, child)


def test_a_family_has_orphans_of_its_session() -> None:
    parent, child = start(apart=False)
    try:
        parent.kill()
        parent.wait()
        assert child in family([], sessions=[parent.pid])
        assert child not in family([])
    finally:
        end(parent, child)


def test_a_family_is_killed_whole() -> None:
    parent, child = start(apart=True)
    descriptor = os.pidfd_open(child)
    try:
        kill_family([parent.pid])
        assert parent.wait() == -signal.SIGKILL
        # The child is not ours to wait for; its descriptor becomes readable when it has ended.
        readable, _, _ = select.select([descriptor], [], [], 30)
        assert readable == [descriptor]
    finally:
        os.close(descriptor)
        end(parent, child)


def test_nobody_is_the_family_of_nobody() -> None:
    assert family([]) == set()
    kill_family([])
