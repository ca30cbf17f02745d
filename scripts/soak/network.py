"""Hosts on one machine: network namespaces, each with a cable to a switch that can be pulled out."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Final

__all__ = ["Network", "enter_namespace"]

_CLONE_NEWNET: Final = 0x40000000
_SUBNET: Final = "10.213.78"


def _ip(*arguments: str, check: bool = True) -> None:
    command = ["ip", *arguments]
    subprocess.run(command, check=check, capture_output=True, text=True, timeout=10)


def enter_namespace(name: str) -> None:
    """Move this process to a namespace. Sockets that it has already stay where they are."""
    namespace = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {name}")
    finally:
        os.close(namespace)


class Network:
    """A switch in this namespace, and a host for each name. `close` takes all of it away."""

    def __init__(self, names: Sequence[str]) -> None:
        self._id = f"{os.getpid() % 100_000:05d}"
        self.bridge = f"arpcs{self._id}"
        self.address = f"{_SUBNET}.254"
        self._hosts = {name: number for number, name in enumerate(names, start=1)}
        if shutil.which("ip") is None:
            raise OSError("there is no `ip` to make network namespaces with")
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self.close()
            raise OSError(f"this machine makes no network namespaces: {error.stderr.strip()}") from error

    def _make(self) -> None:
        _ip("link", "add", self.bridge, "type", "bridge")
        _ip("addr", "add", f"{self.address}/24", "dev", self.bridge)
        _ip("link", "set", self.bridge, "up")
        for name in self._hosts:
            namespace, cable = self.namespace(name), self._cable(name)
            _ip("netns", "add", namespace)
            _ip("link", "add", cable, "type", "veth", "peer", "name", "cable", "netns", namespace)
            _ip("link", "set", cable, "master", self.bridge, "up")
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", namespace, "addr", "add", f"{self.address_of(name)}/24", "dev", "cable")
            _ip("-n", namespace, "link", "set", "cable", "up")

    def namespace(self, name: str) -> str:
        return f"arpc-soak-{self._id}-{name}"

    def address_of(self, name: str) -> str:
        return f"{_SUBNET}.{self._hosts[name]}"

    def _cable(self, name: str) -> str:
        return f"as{self._id}n{self._hosts[name]}"

    def cut(self, name: str) -> None:
        """Pull the cable of a host: nothing gets through, and nobody is told."""
        # not the link itself: a host sees that its own cable is out, and what is under way would fail at once
        _ip("link", "set", self._cable(name), "nomaster")

    def heal(self, name: str) -> None:
        _ip("link", "set", self._cable(name), "master", self.bridge)

    def close(self) -> None:
        for name in self._hosts:
            # what was not made cannot be removed, and that is fine; the cable goes with the namespace
            _ip("netns", "del", self.namespace(name), check=False)
        _ip("link", "del", self.bridge, check=False)
