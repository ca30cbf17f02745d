"""Somebody who only looks, over real sockets."""

from __future__ import annotations

import argparse
import asyncio

import msgspec
import pytest
from torch.distributed import HashStore

import arpc
from arpc.agent.peers.link import ONLOOKER
from arpc.agent.scope import current_scope
from arpc.certs import Authority
from arpc.cli import main
from arpc.console.attachment import attach, choose
from arpc.console.onlooker import Onlooker
from arpc.errors import (
    AuthenticationError,
    ConfigurationError,
    HandshakeError,
    OverloadedError,
    WireError,
    WorkerLostError,
)
from arpc.metrics import attach as attach_module
from arpc.metrics.attach import Attachable
from arpc.metrics.stacks import WorkerStack
from arpc.testing.endpoints import turns_until
from arpc.wire.frames import frame
from arpc.wire.handshake import Identity
from arpc.wire.messages import MessageType

SECRET = b"swordfish"


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(attach_module, "socket_directory", lambda: tmp_path)
    monkeypatch.delenv("ARPC_SECRET", raising=False)
    monkeypatch.delenv("ARPC_SECRET_FILE", raising=False)


async def start(name, rank, store, options):
    current_scope.set(None)
    return await arpc.init_rpc(name, rank=rank, world_size=2, store=store, options=options)


@pytest.fixture
async def group():
    store = HashStore()
    options = arpc.RpcOptions(gc_freeze=False, secret=SECRET, http="127.0.0.1:0")
    workers = await asyncio.gather(
        *(asyncio.create_task(start(name, rank, store, options)) for rank, name in enumerate(("ps", "trainer")))
    )
    yield workers
    await asyncio.gather(*(worker.shutdown(graceful=False) for worker in workers))


def address_of(worker, scheme="unix"):
    addresses = worker.statistics()["connector"]["listening"]
    return next(address for address in addresses if address.startswith(scheme))


async def for_ever():
    await asyncio.Event().wait()


async def double(value):
    return 2 * value


def arguments(**more):
    given = {"address": None, "worker": None, "pid": None, "secret_file": None}
    return argparse.Namespace(**(given | more))


@pytest.mark.parametrize("scheme", ["unix", "tcp"])
async def test_it_may_ask_and_is_in_no_books(group, scheme):
    options = arpc.RpcOptions(secret=SECRET)
    async with Onlooker(address_of(group[0], scheme), options) as onlooker:
        assert onlooker.worker == "ps"
        summary = msgspec.msgpack.decode(await onlooker.ask("group", 30.0))
        assert [worker["name"] for worker in summary["workers"]] == ["ps", "trainer"]
        assert [worker["handlers"] for worker in summary["workers"]] == [0, 0]  # its own question is none
        stacks = msgspec.msgpack.decode(await onlooker.ask("stack"), type=WorkerStack)
        assert stacks.name == "ps"
        assert {peer.info.name for peer in group[0].agent.peers} == {"ps", "trainer"}
        assert [link.is_onlooker for link in group[0].agent.connector.links].count(True) == 1
    await turns_until(lambda: not any(link.is_onlooker for link in group[0].agent.connector.links))
    assert await group[1].rpc_sync("ps", double, args=(1,)) == 2


async def test_without_the_secret_it_is_refused(group):
    with pytest.raises(HandshakeError):
        async with Onlooker(address_of(group[0]), arpc.RpcOptions(secret=b"a guess")):
            raise AssertionError("it must not get in")


async def test_it_may_do_nothing_but_ask(group, caplog):
    async with Onlooker(address_of(group[0]), arpc.RpcOptions(secret=SECRET)) as onlooker:
        asked = asyncio.create_task(onlooker.ask("group", 30.0))
        await asyncio.sleep(0)
        onlooker._connection.send(frame(MessageType.REQUEST, 0, 99, 0, 0, b"no pickle at all"))
        with pytest.raises(WorkerLostError):
            await asked
    assert any("onlooker" in record.getMessage() for record in caplog.records)
    assert await group[1].rpc_sync("ps", double, args=(2,)) == 4


async def test_nor_when_the_worker_is_counting_or_observed(group):
    async with Onlooker(address_of(group[0]), arpc.RpcOptions(secret=SECRET)) as onlooker:
        await onlooker.ask("snapshot")
        group[0].agent.set_meter(None)
        asked = asyncio.create_task(onlooker.ask("group", 30.0))
        await asyncio.sleep(0)
        onlooker._connection.send(frame(MessageType.REQUEST, 0, 99, 0, 0, b"no pickle at all"))
        with pytest.raises(WorkerLostError):
            await asked


async def test_of_what_it_asked_nothing_is_kept_where_calls_are_counted(group):
    assert group[0].metrics.is_counting
    async with Onlooker(address_of(group[0]), arpc.RpcOptions(secret=SECRET)) as onlooker:
        await onlooker.ask("group", 30.0)
        (link,) = [link for link in group[0].agent.connector.links if link.is_onlooker]
        assert not link.is_busy


async def test_only_so_many_of_its_questions_are_answered_at_once(group, monkeypatch):
    may_end, begun = asyncio.Event(), 0

    async def trace(seconds, form):
        nonlocal begun
        begun += 1
        await may_end.wait()
        return b""

    monkeypatch.setattr(group[0].metrics, "trace", trace)
    async with Onlooker(address_of(group[0]), arpc.RpcOptions(secret=SECRET)) as onlooker:
        asked = [asyncio.create_task(onlooker.ask("group_trace", 1.0, "json")) for _ in range(20)]
        done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_EXCEPTION)
        assert all(isinstance(one.exception(), OverloadedError) for one in done)
        may_end.set()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert (begun, answers.count(b"")) == (16, 16)
        assert await onlooker.ask("group_trace", 1.0, "json") == b""


async def test_one_that_reads_no_answers_is_sent_away(group, monkeypatch):
    async with Onlooker(address_of(group[0]), arpc.RpcOptions(secret=SECRET)) as onlooker:
        await onlooker.ask("snapshot")
        (link,) = [link for link in group[0].agent.connector.links if link.is_onlooker]
        monkeypatch.setattr(type(link.connection), "unsent_bytes", (64 << 20) + 1)
        with pytest.raises(WorkerLostError):
            await onlooker.ask("snapshot")


async def test_a_group_does_not_wait_for_one_who_looks(group, monkeypatch):
    begun = asyncio.Event()

    async def trace(seconds, form):
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(group[0].metrics, "trace", trace)
    async with Onlooker(address_of(group[0]), arpc.RpcOptions(secret=SECRET)) as onlooker:
        asked = asyncio.create_task(onlooker.ask("group_trace", 100.0, "json", timeout_s=100.0))
        await begun.wait()
        await asyncio.gather(*(worker.shutdown(timeout=60) for worker in group))
        with pytest.raises((WorkerLostError, arpc.ShutdownError)):
            await asked


@pytest.mark.parametrize("name", ["ps", "trainer"])
async def test_it_may_not_have_the_name_of_a_worker(group, name, monkeypatch):
    def named(_name, *rest, **more):
        return Identity(name, *rest, **more)

    monkeypatch.setattr("arpc.console.onlooker.Identity", named)
    with pytest.raises(HandshakeError, match="onlooker has the name"):
        async with Onlooker(address_of(group[0]), arpc.RpcOptions(secret=SECRET)):
            raise AssertionError("it must not get in")


async def test_over_tls_it_needs_a_certificate_of_its_own(tmp_path):
    pytest.importorskip("cryptography")
    authority = Authority(tmp_path)
    options = arpc.RpcOptions(gc_freeze=False, tls=authority.issue("ps"), listen=("tcp://127.0.0.1:0",))
    worker = await arpc.init_rpc("ps", rank=0, world_size=1, store=HashStore(), options=options)
    try:
        mine = arpc.RpcOptions(tls=authority.issue("onlooker-*"))
        async with Onlooker(address_of(worker, "tcp"), mine) as onlooker:
            assert msgspec.msgpack.decode(await onlooker.ask("stack"), type=WorkerStack).name == "ps"
        with pytest.raises(AuthenticationError):
            async with Onlooker(address_of(worker, "tcp"), options):
                raise AssertionError("that is the certificate of a worker")
    finally:
        await worker.shutdown(graceful=False)


async def test_without_a_secret_no_other_host_is_trusted():
    with pytest.raises(ConfigurationError, match="cannot prove that it is a worker"):
        async with attach(arguments(address="tcp://192.0.2.1:7000")):
            raise AssertionError("nobody proved anything")


async def test_what_the_worker_raises_is_raised(group):
    async with Onlooker(address_of(group[0]), arpc.RpcOptions(secret=SECRET)) as onlooker:
        with pytest.raises(ValueError, match="another version"):
            await onlooker.ask("horoscope")


async def test_a_worker_that_ends_is_lost(group):
    async with Onlooker(address_of(group[0]), arpc.RpcOptions(secret=SECRET)) as onlooker:
        await group[0].shutdown(graceful=False)
        await turns_until(lambda: not onlooker._connection.is_open)
        with pytest.raises(WorkerLostError):
            await onlooker.ask("snapshot")


async def test_a_worker_is_found_by_its_file(group, monkeypatch, tmp_path):
    monkeypatch.setenv("ARPC_SECRET", SECRET.decode())
    async with attach(arguments(worker="trainer")) as found:
        assert (await found.summary()).served_by == "trainer"
        assert [worker.name for worker in await found.stacks()] == ["ps", "trainer"]


async def test_the_secret_may_be_in_a_file(group, tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    async with attach(arguments(worker="ps", secret_file=path)) as found:
        assert (await found.summary()).served_by == "ps"
    path.write_bytes(b"")
    with pytest.raises(ConfigurationError, match="empty"):
        async with attach(arguments(worker="ps", secret_file=path)):
            raise AssertionError("there is no secret")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        async with attach(arguments(worker="ps", secret_file=tmp_path / "nowhere")):
            raise AssertionError("there is no secret")


async def test_it_attaches_to_the_page_too(group, monkeypatch):
    monkeypatch.setenv("ARPC_SECRET", SECRET.decode())
    async with attach(arguments(address=group[0].http_address)) as found:
        assert (await found.summary()).served_by == "ps"
        assert len(await found.stacks()) == 2
    group[0].http._guard.needs_secret = True
    async with attach(arguments(address=group[0].http_address)) as found:
        assert (await found.summary()).served_by == "ps"
    monkeypatch.setenv("ARPC_SECRET", "a guess")
    with pytest.raises(AuthenticationError, match="secret"):
        async with attach(arguments(address=group[0].http_address)) as found:
            await found.summary()


@pytest.mark.parametrize("address", ["unix:///nowhere/at.all", "http://127.0.0.1:1", "tcp://127.0.0.1:1"])
async def test_an_address_where_nobody_is(address):
    with pytest.raises(WireError, match="cannot be reached"):
        async with attach(arguments(address=address)) as found:
            await found.summary()


async def test_an_address_that_is_none():
    with pytest.raises(ConfigurationError, match="address like"):
        async with attach(arguments(address="carrier-pigeon")):
            raise AssertionError("there is no such thing")


def test_the_newest_that_fits_is_chosen():
    workers = [Attachable(name, number, 100 + number, 0.0, ()) for number, name in enumerate("abca")]
    assert choose(workers, None, None).id == 0
    assert choose(workers, "c", None).id == 2
    assert choose(workers, "a", 103).id == 3
    with pytest.raises(ConfigurationError, match="there are a"):
        choose(workers, "z", None)
    with pytest.raises(ConfigurationError, match="start a group"):
        choose([], None, None)


@pytest.mark.parametrize("command", [["top", "--once"], ["stack"]])
def test_the_commands_say_when_there_is_nobody(command, capsys):
    assert main(command) == 1
    assert "no worker of this user runs" in capsys.readouterr().err


def test_an_onlooker_is_known_by_its_feature():
    assert ONLOOKER == "onlooker"  # part of what goes over the wire
