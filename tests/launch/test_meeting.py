from __future__ import annotations

import socket

import pytest

from arpc.errors import ConfigurationError
from arpc.launch.meeting import HTTP_PORT, StoreServer, answers, choose_http


def test_a_dashboard_goes_where_it_was_wished_for():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match="cannot be at"):
            choose_http(address)
    assert choose_http(address) == address


def test_a_dashboard_goes_elsewhere_if_the_usual_port_is_taken(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr("arpc.launch.meeting.HTTP_PORT", port)
        host, _, chosen = choose_http("").partition(":")
        assert host == "127.0.0.1"
        assert int(chosen) != port
    assert choose_http("") == f"127.0.0.1:{port}"
    assert HTTP_PORT == 27720


@pytest.mark.parametrize("wish", ["27720", "localhost:", "localhost:http", ":1"])
def test_what_is_no_address(wish: str):
    with pytest.raises(ConfigurationError, match="HOST:PORT"):
        choose_http(wish)


async def test_a_store_has_its_port_before_it_is_served():
    from torch.distributed import TCPStore

    server = StoreServer()
    address = f"127.0.0.1:{server.port}"
    assert await answers(address)  # whoever comes now waits for it
    await server.serve()
    store = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    store.set("key", "value")
    assert store.get("key") == b"value"
    del store
    await server.aclose()
    assert not await answers(address)


async def test_a_store_that_was_never_served_is_closed():
    server = StoreServer()
    await server.aclose()
    assert not await answers(f"127.0.0.1:{server.port}")
