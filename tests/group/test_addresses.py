"""Where a worker listens when nobody said, and which doors stay shut."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from arpc.errors import ConfigurationError
from arpc.group import addresses
from arpc.group.addresses import check_guarded, default_addresses, reachable_address
from arpc.options import RpcOptions

OPEN = RpcOptions()
SECRET = RpcOptions(secret=b"sixteen bytes or more")


@pytest.fixture
def interface(monkeypatch):
    """Says which interface leads to other hosts, of which there are none in a test."""
    monkeypatch.setattr(addresses, "_interface_towards", lambda *_: "10.0.0.5")


@pytest.mark.parametrize("host", [None, "127.0.0.1", "localhost", "::1"])
async def test_a_group_of_one_host_needs_no_more_than_a_unix_socket(host):
    assert await default_addresses(OPEN, host) == ("unix://",)
    assert await default_addresses(SECRET, host) == ("unix://", "tcp://127.0.0.1:0")


async def test_a_group_of_many_hosts_listens_on_the_interface_that_leads_there(interface):
    with pytest.raises(ConfigurationError, match=r"10\.0\.0\.9.*ARPC_SECRET"):
        await default_addresses(OPEN, "10.0.0.9")
    for options in (SECRET, OPEN.replace(insecure=True)):
        assert await default_addresses(options, "10.0.0.9") == ("unix://", "tcp://10.0.0.5:0")


async def test_a_host_that_cannot_be_found_or_reached_is_an_error(monkeypatch):
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror("unknown")

    monkeypatch.setattr(addresses, "_interface_towards", lambda *_: None)
    with pytest.raises(ConfigurationError, match="no interface of this machine leads there"):
        await default_addresses(SECRET, "10.0.0.9")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigurationError, match="cannot be found"):
        await default_addresses(SECRET, "no-such-host.invalid")


async def test_a_host_need_not_find_its_own_name(interface, monkeypatch):
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror("not yet")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(socket, "gethostname", lambda: "train-0")
    assert await default_addresses(SECRET, "train-0.train") == ("unix://", "tcp://10.0.0.5:0")
    with pytest.raises(ConfigurationError, match="cannot be found"):
        await default_addresses(SECRET, "train-1.train")


async def test_all_interfaces_are_called_by_the_one_that_others_can_reach(interface):
    assert await reachable_address("tcp://0.0.0.0:7", "10.0.0.9") == "tcp://10.0.0.5:7"
    assert await reachable_address("tcp://0.0.0.0:7", None) == "tcp://10.0.0.5:7"
    assert await reachable_address("tcp://10.1.1.1:7", "10.0.0.9") == "tcp://10.1.1.1:7"
    assert await reachable_address("unix:///path", "10.0.0.9") == "unix:///path"


async def test_a_machine_with_no_way_out_is_called_by_loopback(monkeypatch):
    monkeypatch.setattr(addresses, "_interface_towards", lambda *_: None)
    assert await reachable_address("tcp://0.0.0.0:7", None) == "tcp://127.0.0.1:7"
    assert await reachable_address("tcp://[::]:7", None) == "tcp://[::1]:7"


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://10.0.0.5:1234", "tcp://[::]:0", "tcp://a-name:1"])
def test_an_open_door_needs_a_secret(address, caplog):
    with pytest.raises(ConfigurationError, match="refusing to listen on"):
        check_guarded([address], OPEN)
    check_guarded([address], SECRET)
    assert not caplog.records
    check_guarded([address], OPEN.replace(insecure=True))
    assert "WITHOUT A SECRET" in caplog.text


@pytest.mark.parametrize(
    "address", ["unix://", "tcp://127.0.0.1:0", "tcp://127.0.1.1:0", "tcp://localhost:0", "memory://"]
)
def test_doors_within_this_host_may_be_open(address, caplog):
    check_guarded([address], OPEN)
    assert not caplog.records
