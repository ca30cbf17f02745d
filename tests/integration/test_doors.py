"""Who may come in, and what happens to those who may not."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from contextlib import suppress

import pytest
import torch

import arpc
from arpc.transport.sockets import split_tcp
from arpc.wire.handshake import Handshake, Identity, Role
from tests.certificates import tls_for
from tests.integration import functions
from tests.integration.processes import QUICK, Processes, Start

MIB = 1 << 20
STRANGER = Identity("stranger", 4711, 1)


async def talk(address: str, *words: bytes) -> bytes:
    """Say something to a listening worker; everything it says until it hangs up."""
    if address.startswith("unix://"):
        reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix://"))
    else:
        reader, writer = await asyncio.open_connection(*split_tcp(address))
    try:
        for word in words:
            writer.write(word)
            await writer.drain()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def test_bad_bytes_close_that_connection_only(processes: Processes):
    hello = Handshake(Role.CONNECTOR, STRANGER, None).start()
    bad = [
        b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n",
        b"\0" * 1000,
        b"\xff" * 1000,
        os.urandom(MIB),
        struct.pack("<IBBHQIIII", 2**32 - 1, 1, 0, 0, 0, 1, 0, 0, 0),  # a frame of 4 GiB
        hello[:32] + b"\xc1" * (len(hello) - 32),
        hello + hello,
        hello + struct.pack("<IBBHQIIII", 3, 17, 0, 0, 1, 0, 0, 0, 0) + b"abc",  # a call before the proof
    ]
    options = QUICK.replace(listen=("unix://", "tcp://127.0.0.1:0"))
    async with processes.group("a", "b", main=functions.serve, options=options) as worker:
        call = worker.rpc_async("a", functions.hang, args=([],), timeout=0)
        record = await worker.rendezvous.resolve("a")
        assert len(record.addresses) == 2
        for address in record.addresses:
            async with asyncio.timeout(30):
                await asyncio.gather(*(talk(address, words) for words in bad * 3))
        assert not call.done()
        call.cancel()
        assert await worker.rpc_sync("a", functions.relay, args=(["b", "a"], 1)) == (["a", "b", "a"], 1)
        assert "Traceback" not in processes["a"].output
        statistics = await worker.rpc_sync("a", functions.statistics)
        assert statistics["connector"]["refused"] >= 2 * 3 * len(bad)
        assert set(await worker.rpc_sync("a", functions.connections)) == {"test", "b"}


async def test_a_malformed_frame_of_a_member_costs_it_its_connection(processes: Processes):
    async with processes.group("a", "b", main=functions.serve) as worker:
        assert await worker.rpc_sync("a", functions.echo, args=(1,)) == 1
        pending = worker.rpc_async("a", functions.hang, args=([],), timeout=0)
        connection = worker.agent.known_peer("a").connection
        connection.send(b"\xff" * 64)
        with pytest.raises(arpc.WorkerLostError, match="'a' was lost"):
            await pending
        assert await worker.rpc_sync("a", functions.relay, args=(["b"], 2)) == (["a", "b"], 2)
        assert "the connection to worker test was closed" in processes["a"].output


async def test_another_secret_is_refused(processes: Processes):
    options = QUICK.replace(secret=b"the right one")
    start = Start("a", processes.init_method, 1, 4, options)
    processes.start(start, functions.serve)
    processes.start(Start("wrong", start.init_method, 2, 4, QUICK.replace(secret=b"a guess")), functions.serve)
    processes.start(Start("without", start.init_method, 3, 4, QUICK), functions.serve)
    worker = await Start("test", start.init_method, 0, 4, options).join()
    try:
        assert await worker.rpc_sync("a", functions.echo, args=(1,)) == 1
        with pytest.raises(arpc.AuthenticationError, match=r"'wrong'.*another group secret"):
            await worker.rpc_sync("wrong", functions.echo, args=(2,))
        with pytest.raises(arpc.AuthenticationError, match=r"'without'.*no group secret.*ARPC_SECRET"):
            await worker.rpc_sync("without", functions.echo, args=(3,))
        # and the other way round, nothing of what they send is looked at
        assert await worker.rpc_sync("a", functions.echo, args=(4,)) == 4
    finally:
        await worker.shutdown(graceful=False)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://[::]:0"])
@pytest.mark.usefixtures("runtime_directory")
async def test_no_open_door_without_a_secret(tmp_path, address):
    start = Start("test", f"file://{tmp_path / 'store'}", 0, 1, QUICK.replace(listen=(address,)))
    with pytest.raises(arpc.ConfigurationError, match=r"refusing to listen on .* Set ARPC_SECRET"):
        await start.join()


@pytest.mark.usefixtures("runtime_directory")
async def test_an_open_door_with_a_secret(tmp_path):
    options = QUICK.replace(listen=("tcp://0.0.0.0:0",), secret=b"secret")
    async with Start("test", f"file://{tmp_path / 'store'}", 0, 1, options).join() as worker:
        (address,) = (await worker.rendezvous.resolve("test")).addresses
        host, port = split_tcp(address)
        assert host != "0.0.0.0", "nobody can call an address that stands for all of one's own"
        assert port > 0
        with socket.create_connection((host, port), timeout=5):
            pass


@pytest.mark.usefixtures("runtime_directory")
async def test_a_door_left_open_on_purpose(tmp_path, caplog):
    options = QUICK.replace(listen=("tcp://0.0.0.0:0",), insecure=True)
    async with Start("test", f"file://{tmp_path / 'store'}", 0, 1, options).join():
        assert "WITHOUT A SECRET" in caplog.text


async def test_workers_with_certificates_let_nobody_else_in(processes: Processes):
    options = QUICK.replace(listen=("tcp://127.0.0.1:0",), tls=tls_for("*"), bulk_connections=1)
    async with processes.group("a", "b", main=functions.serve, options=options) as worker:
        assert await worker.rpc_sync("a", functions.relay, args=(["b", "a"], 1)) == (["a", "b", "a"], 1)
        large = torch.arange(MIB)
        assert torch.equal(await worker.rpc_sync("a", functions.echo, args=(large,)), large)
        (address,) = (await worker.rendezvous.resolve("a")).addresses
        hello = Handshake(Role.CONNECTOR, STRANGER, None).start()
        async with asyncio.timeout(30):
            for words in (hello, b"\x16\x03\x01\0\x05hello", b"GET / HTTP/1.1\r\n\r\n"):
                assert b"arpc" not in await talk(address, words)
        assert await worker.rpc_sync("a", functions.echo, args=(2,)) == 2


async def test_workers_of_one_host_share_memory_whether_or_not_they_have_certificates(processes: Processes):
    async with processes.group("a", main=functions.serve, options=QUICK.replace(tls=tls_for("*"))) as worker:
        large = torch.arange(MIB)
        assert torch.equal(await worker.rpc_sync("a", functions.echo, args=(large,)), large)
        connection = worker.agent.known_peer("a").connection
        assert connection.address.startswith("unix://")
        assert connection.bytes_sent < large.nbytes
