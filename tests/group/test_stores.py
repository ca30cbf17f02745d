from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator

import psutil
import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from arpc.errors import ConfigurationError, RendezvousError, RendezvousTimeoutError
from arpc.group.group_store import GroupStore, KeyValues
from arpc.group.stores import open_store
from tests.agent.groups import store_threads, until

VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "USE_LIBUV",
)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    assert not store_threads()


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def mute_port() -> Iterator[int]:
    """A port where connections are accepted, by the kernel, and nobody says anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


async def share(*stores: GroupStore) -> None:
    """Assert that they are views of one store, and close them, the host last."""
    await stores[0].run(lambda kv: kv.set("shared", b"yes"))
    for store in stores:
        assert await store.run(lambda kv: kv.peek("shared")) == b"yes"
    for store in reversed(stores):
        await store.aclose()


# -- who we are -------------------------------------------------------------------------------------------------------


async def test_place_is_what_was_passed():
    group = await open_store(store=HashStore(), rank=1, world_size=2)
    assert (group.rank, group.world_size) == (1, 2)
    await group.aclose()


async def test_place_from_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    group = await open_store(store=HashStore())
    assert (group.rank, group.world_size) == (3, 4)
    await group.aclose()


async def test_an_elastic_worker_ignores_the_size_in_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    group = await open_store(store=HashStore(), world_size=None)
    assert (group.rank, group.world_size) == (3, None)
    await group.aclose()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"world_size": 2}, "rank is missing: pass rank=, or set RANK"),
        ({"rank": 0}, "world_size is missing.*WORLD_SIZE.*world_size=None makes an elastic group"),
        ({"rank": 2, "world_size": 2}, "rank must be between 0 and 1 in a group of 2, not 2"),
        ({"rank": -1, "world_size": 2}, "rank must be between 0 and 1"),
        ({"rank": 0, "world_size": 0}, "world_size must be between 1 and 65536, not 0"),
        ({"rank": 0, "world_size": 65537}, "world_size must be between 1 and 65536"),
        ({"rank": 65536, "world_size": None}, "rank must be between 0 and 65535"),
        ({"rank": "0", "world_size": 1}, "rank must be a whole number, not '0'"),
        ({"rank": True, "world_size": 2}, "rank must be a whole number"),
        ({"init_method": "tcp://a:1?rank=x", "world_size": 2}, "rank in init_method must be a whole number, not 'x'"),
        ({"init_method": "tcp://a:1?rank=1", "rank": 0, "world_size": 2}, "rank is 0, but init_method says rank=1"),
        ({"init_method": "tcp://a:1?world_size=2", "world_size": None}, "elastic group, but init_method has a world"),
        ({"rank": 0, "world_size": 1}, "'env://' needs the environment variable MASTER_ADDR"),
        ({"init_method": "tcp://host", "rank": 0, "world_size": 1}, "must name a host and a port"),
        ({"init_method": "tcp://host:x", "rank": 0, "world_size": 1}, "port of 'tcp://host:x' must be a whole number"),
        ({"init_method": "tcp://host:65536", "rank": 0, "world_size": 1}, "between 0 and 65535, not 65536"),
        ({"init_method": "tcp://127.0.0.1:0", "rank": 1, "world_size": 2}, "port 0, which only the host"),
        ({"init_method": "etcd://host:1", "rank": 0, "world_size": 1}, "none of env://, tcp://host:port and file:///"),
        ({"init_method": "file://", "rank": 0, "world_size": 1}, "no absolute path: write file:///path"),
        ({"init_method": "file://here", "rank": 0, "world_size": 1}, "no absolute path"),
        ({"init_method": "file:///no/such/place", "rank": 0, "world_size": 1}, "there is no directory /no/such"),
        ({"init_method": "file:///tmp", "rank": 0, "world_size": 1}, "is a directory"),
        ({"store": {}, "rank": 0, "world_size": 1}, "must be a torch.distributed.Store, not dict"),
    ],
)
async def test_what_cannot_work_is_said_at_once(arguments, text):
    with pytest.raises(ConfigurationError, match=text):
        await open_store(**arguments)


async def test_a_port_that_is_no_number(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ConfigurationError, match="MASTER_PORT, which is not set"):
        await open_store(rank=0, world_size=1)
    monkeypatch.setenv("MASTER_PORT", "http")
    with pytest.raises(ConfigurationError, match="MASTER_PORT must be a whole number, not 'http'"):
        await open_store(rank=0, world_size=1)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigurationError, match="environment variable RANK must be a whole number, not 'first'"):
        await open_store(world_size=1)


# -- ready stores -----------------------------------------------------------------------------------------------------


async def test_a_ready_store_tells_where_it_is():
    tcp = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = await open_store(store=PrefixStore("a", PrefixStore("b", tcp)), rank=0, world_size=1)
    assert group.access.host == "127.0.0.1"
    assert group.access.description == f"PrefixStore at 127.0.0.1:{tcp.port}"
    assert not group.access.is_host
    await group.aclose()
    tcp.set("still", "there")
    group = await open_store(store=HashStore(), rank=0, world_size=1)
    assert group.access.host is None
    await group.aclose()


# -- file:// ----------------------------------------------------------------------------------------------------------


async def test_file(tmp_path):
    path = tmp_path / "store"
    stores = [await open_store(init_method=f"file://{path}", rank=rank, world_size=2) for rank in range(2)]
    assert stores[0].access.description == f"file://{path}"
    assert path.exists()
    await share(*stores)
    assert not path.exists(), "the last one removes it"


async def test_file_with_the_place_in_its_query(tmp_path):
    store = await open_store(init_method=f"file://{tmp_path}/store?rank=0&world_size=1")
    assert (store.rank, store.world_size) == (0, 1)
    await store.aclose()


async def test_elastic_file(tmp_path):
    stores = [await open_store(init_method=f"file://{tmp_path}/store", world_size=None) for _ in range(2)]
    await share(*stores)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_directory_that_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigurationError, match="cannot be written"):
        await open_store(init_method=f"file://{tmp_path}/store", rank=0, world_size=1)


# -- tcp:// and env:// ------------------------------------------------------------------------------------------------


async def test_tcp():
    host = await open_store(init_method="tcp://127.0.0.1:0", rank=0, world_size=3)
    assert host.access.is_host
    address = f"tcp://127.0.0.1:{host.access.port}"
    assert host.access.description == address
    clients = [
        await open_store(init_method=address, rank=1, world_size=3),
        await open_store(init_method=f"{address}?rank=2&world_size=3"),
    ]
    assert not any(client.access.is_host for client in clients)
    assert [client.rank for client in clients] == [1, 2]
    await share(host, *clients)


@pytest.mark.parametrize("query", ["use_libuv=0", "use_libuv=1"])
async def test_either_server_of_torch(query):
    host = await open_store(init_method=f"tcp://127.0.0.1:0?{query}", rank=0, world_size=2)
    client = await open_store(init_method=f"tcp://127.0.0.1:{host.access.port}", rank=1, world_size=2)
    await share(host, client)


async def test_tcp_over_ipv6():
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on loopback")
    host = await open_store(init_method="tcp://[::1]:0", rank=0, world_size=2)
    client = await open_store(init_method=f"tcp://[::1]:{host.access.port}", rank=1, world_size=2)
    assert host.access.host == "::1"
    await share(host, client)


async def test_env(monkeypatch, closed_port):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(closed_port))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    # the host may come last
    waiting = asyncio.create_task(open_store())
    host = await open_store(rank=0)
    client = await waiting
    assert (host.rank, client.rank) == (0, 1)
    assert (host.access.is_host, client.access.is_host) == (True, False)
    await share(host, client)


@pytest.mark.parametrize("init_method", ["env://", "tcp://127.0.0.1:{port}"])
async def test_under_torchrun_nobody_serves(monkeypatch, init_method):
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    stores = [
        await open_store(init_method=init_method.format(port=agent.port), rank=rank, world_size=2) for rank in range(2)
    ]
    assert not any(store.access.is_host for store in stores)
    await share(*stores)


async def test_under_torchrun_another_address_is_served_by_rank_0(monkeypatch, closed_port):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(closed_port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    host = await open_store(init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    assert host.access.is_host
    await host.aclose()


async def test_a_server_of_this_process_is_shared():
    # as a process group has it that was started with env:// before
    others = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    group = await open_store(init_method=f"tcp://127.0.0.1:{others.port}", rank=0, world_size=1)
    await group.run(lambda kv: kv.set("key", b"value"))
    assert others.get("arpc/key") == b"value"
    await group.aclose()
    others.set("still", "there")


async def test_a_group_on_loopback_is_not_served_to_the_world():
    host = await open_store(init_method="tcp://localhost:0", rank=0, world_size=1)
    listening = {
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == host.access.port
    }
    assert listening == {"127.0.0.1"}
    await host.aclose()


async def test_a_port_of_another_program(mute_port):
    with pytest.raises(
        RendezvousError, match=rf"cannot serve .* at tcp://127.0.0.1:{mute_port}: .*choose another port"
    ):
        await open_store(init_method=f"tcp://127.0.0.1:{mute_port}", rank=0, world_size=1)


async def test_nobody_there(closed_port):
    with pytest.raises(RendezvousTimeoutError, match=rf"no store at tcp://127.0.0.1:{closed_port} .*Is rank 0 running"):
        await open_store(init_method=f"tcp://127.0.0.1:{closed_port}", rank=1, world_size=2, timeout_s=0.1)


async def test_a_host_that_does_not_exist():
    with pytest.raises(RendezvousTimeoutError, match=r"no store at tcp://nobody.invalid:1"):
        await open_store(init_method="tcp://nobody.invalid:1", rank=1, world_size=2, timeout_s=0.1)


async def test_something_that_is_no_store():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(RendezvousTimeoutError, match="something listens there, but does not answer as a store"):
            await open_store(init_method=f"tcp://127.0.0.1:{port}", rank=1, world_size=2, timeout_s=0.2)
        # torch waits for an answer, for ever: its thread stays until there is none to be had
        threads = store_threads()
    for thread in threads:
        await asyncio.to_thread(thread.join, 20)


async def test_cancelled_while_nobody_is_there(closed_port):
    opening = asyncio.create_task(open_store(init_method=f"tcp://127.0.0.1:{closed_port}", rank=1, world_size=2))
    await until(lambda: opening.get_coro().cr_await)  # it waits for somebody to be there
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert not store_threads()


@pytest.mark.parametrize("turns", range(0, 30, 2))
async def test_cancelled_at_any_step_the_host_does_not_wait_for_it(turns):
    host = await open_store(init_method="tcp://127.0.0.1:0", rank=0, world_size=2)
    opening = asyncio.create_task(open_store(init_method=host.access.description, rank=1, world_size=2))
    for _ in range(turns):
        await asyncio.sleep(0)
    opening.cancel()
    try:
        client = await opening
    except asyncio.CancelledError:
        pass
    else:
        assert await host.run(KeyValues.has_guests)
        await client.aclose()
    assert not await host.run(KeyValues.has_guests)
    await host.aclose()


async def test_the_first_of_an_elastic_group_serves(closed_port):
    address = f"tcp://127.0.0.1:{closed_port}"
    stores = await asyncio.gather(*(open_store(init_method=address, world_size=None) for _ in range(4)))
    assert sum(store.access.is_host for store in stores) == 1
    await share(*sorted(stores, key=lambda store: not store.access.is_host))


async def test_an_elastic_worker_with_a_rank_serves_only_as_rank_0(closed_port):
    address = f"tcp://127.0.0.1:{closed_port}"
    client = asyncio.create_task(open_store(init_method=address, rank=1, world_size=None))
    host = await open_store(init_method=address, rank=0, world_size=None)
    assert host.access.is_host
    await share(host, await client)


async def test_an_elastic_worker_does_not_serve_for_another_machine():
    # 192.0.2.0/24 is for documentation: it is nobody's
    with pytest.raises(RendezvousTimeoutError, match=r"no store at tcp://192.0.2.1:29500"):
        await open_store(init_method="tcp://192.0.2.1:29500", world_size=None, timeout_s=0.2)
    with pytest.raises(ConfigurationError, match="is not this machine"):
        await open_store(init_method="tcp://192.0.2.1:0", world_size=None, timeout_s=0.2)


async def test_a_client_finds_the_store_that_comes_after_a_lost_one(closed_port):
    address = f"tcp://127.0.0.1:{closed_port}"
    loop = asyncio.get_running_loop()
    first = await open_store(init_method=address, rank=0, world_size=2)
    client = await open_store(init_method=address, rank=1, world_size=2)
    await first.aclose()
    with pytest.raises(RendezvousError, match="was lost in add"):
        await client.run(lambda kv: kv.add("n", 1))
    reopening = asyncio.create_task(client.reopen(loop.time() + 20))
    second = await open_store(init_method=address, rank=0, world_size=2)
    assert await reopening
    assert not client.is_lost
    await share(second, client)


async def test_a_ready_store_has_no_other_to_find():
    group = await open_store(store=HashStore(), rank=0, world_size=1)
    assert not await group.reopen(float("inf"))
    await group.aclose()
