"""Hosts on one machine: network namespaces, each with a link to a bridge from which it can be taken out."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Final

__all__ = ["Network", "enter_namespace"]

_CLONE_NEWNET: Final = 0x40000000
# a subnet for each process that makes a network: two soaks at a time must not route to each other
_SUBNETS: Final = 200


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
    """A bridge in this namespace, and a host for each name. `close` removes all of it."""

    def __init__(self, names: Sequence[str]) -> None:
        self._id = f"{os.getpid() % 100_000:05d}"
        self.bridge = f"arpcs{self._id}"
        self._subnet = f"10.213.{os.getpid() % _SUBNETS}"
        self.address = f"{self._subnet}.254"
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
            namespace, link = self.namespace(name), self._link(name)
            _ip("netns", "add", namespace)
            _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _ip("link", "set", link, "master", self.bridge, "up")
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", namespace, "addr", "add", f"{self.address_of(name)}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "eth0", "up")

    def namespace(self, name: str) -> str:
        return f"arpc-soak-{self._id}-{name}"

    def address_of(self, name: str) -> str:
        return f"{self._subnet}.{self._hosts[name]}"

    def _link(self, name: str) -> str:
        return f"as{self._id}n{self._hosts[name]}"

    def cut(self, name: str) -> None:
        """Drop all packets from and to a host, without an error on either side."""
        # taking the link down would be visible on the host, and calls in flight would fail at once
        _ip("link", "set", self._link(name), "nomaster")

    def heal(self, name: str) -> None:
        _ip("link", "set", self._link(name), "master", self.bridge)

    def close(self) -> None:
        for name in self._hosts:
            # some may not have been made; the link goes with its namespace
            _ip("netns", "del", self.namespace(name), check=False)
        _ip("link", "del", self.bridge, check=False)
