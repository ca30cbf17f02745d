"""Two hosts on one machine: network namespaces with a cable between them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

__all__ = ["Namespace", "two_hosts"]


class Namespace(NamedTuple):
    """One of the hosts."""

    name: str
    address: str

    @property
    def runner(self) -> list[str]:
        """Put before a command, has it run there."""
        return ["ip", "netns", "exec", self.name]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=10)


@contextmanager
def two_hosts() -> Iterator[tuple[Namespace, Namespace]]:
    """Two hosts that reach each other and nothing else. Skips the test where this user may not make them."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` to make network namespaces with")
    hosts = (
        Namespace(f"arpc-{os.getpid()}-left", "10.213.77.1"),
        Namespace(f"arpc-{os.getpid()}-right", "10.213.77.2"),
    )
    try:
        try:
            for host in hosts:
                _ip("netns", "add", host.name)
            left, right = hosts
            _ip("-n", left.name, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", right.name)
            for host in hosts:
                _ip("-n", host.name, "link", "set", "lo", "up")
                _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "cable")
                _ip("-n", host.name, "link", "set", "cable", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no network namespaces: {error.stderr.strip()}")
        yield hosts
    finally:
        for host in hosts:
            # what was not made cannot be removed, and that is fine
            subprocess.run(["ip", "netns", "del", host.name], check=False, capture_output=True, timeout=10)
