"""Calls between processes: over unix sockets and TCP, nested, many at once, to peers that do not keep up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

import arpc
from tests.integration import functions
from tests.integration.processes import QUICK, Processes

MIB = 1 << 20


@pytest.mark.parametrize("listen", ["unix://", "tcp://127.0.0.1:0"])
async def test_processes_call_each_other(processes: Processes, listen: str):
    options = QUICK.replace(listen=(listen,))
    async with processes.group("a", "b", main=functions.serve, options=options) as worker:
        assert await worker.rpc_sync("a", functions.where) == ("a", processes["a"].pid)
        assert await worker.rpc_sync("b", functions.where) == ("b", processes["b"].pid)
        there, value = await worker.rpc_sync("a", functions.relay, args=(["b", "a", "test", "b"], 42))
        assert (there, value) == (["a", "b", "a", "test", "b"], 42)
        large = torch.arange(3 * MIB, dtype=torch.int32)
        assert torch.equal(await worker.rpc_sync("b", functions.echo, args=(large,)), large)
        assert torch.equal(await worker.rpc_sync("a", functions.plain_echo, args=(large.t(),)), large)
        scheme = listen.partition("://")[0]
        for name in ("a", "b"):
            addresses = await worker.rpc_sync(name, functions.connections)
            assert len(addresses) == 2
            assert all(address.startswith(f"{scheme}://") for address in addresses.values())


async def test_replies_of_threads_and_of_the_loop_share_a_socket(processes: Processes):
    """Small ones that threads send, and large ones that the loop sends in many pieces."""
    options = QUICK.replace(listen=("unix://",), shared_memory_bytes=0)
    async with processes.group("a", main=functions.serve, options=options) as worker:

        async def call(number: int) -> None:
            for turn in range(20):
                value: object = (number, turn)
                if number % 8 == 0:
                    value = torch.full((MIB // 4 + 1000 * turn,), number)
                    assert torch.equal(await worker.rpc_sync("a", functions.plain_echo, args=(value,)), value)
                elif number % 8 == 1:
                    value = bytes([number]) * (40_000 * turn)
                    assert await worker.rpc_sync("a", functions.plain_echo, args=(value,)) == value
                else:
                    function = functions.echo if number % 8 == 2 else functions.plain_echo
                    assert await worker.rpc_sync("a", function, args=(value,)) == value

        await asyncio.gather(*(call(number) for number in range(64)))
        statistics = await worker.rpc_sync("a", functions.statistics)
        assert statistics["executor"]["calls_handled"] >= 64 * 20
        assert statistics["peers"]["test"]["connects"] == 1


async def test_workers_of_one_host_find_their_unix_sockets(processes: Processes):
    async with processes.group("a", "b", main=functions.serve) as worker:
        (address,) = (await worker.rendezvous.resolve("b")).addresses
        assert address.startswith("unix://")
        await worker.rpc_sync("a", functions.relay, args=(["b"], None))
        assert (await worker.rpc_sync("a", functions.connections))["b"] == address


async def test_the_unix_socket_is_the_first_choice_and_not_the_only_one(processes: Processes):
    options = QUICK.replace(listen=("tcp://127.0.0.1:0", "unix://"))
    async with processes.group("a", main=functions.serve, options=options) as worker:
        tcp, unix = (await worker.rendezvous.resolve("a")).addresses
        for address in (unix, tcp):
            assert await worker.rpc_sync("a", functions.echo, args=(1,)) == 1
            assert (await worker.rpc_sync("test", functions.connections))["a"] == address
            await worker.rpc_sync("test", functions.hang_up_on, args=("a",))
            Path(unix.removeprefix("unix://")).unlink(missing_ok=True)


async def test_connections_are_made_when_they_are_needed(processes: Processes):
    names = [f"w{number}" for number in range(7)]
    async with processes.group(*names, main=functions.serve) as worker:
        assert worker.statistics()["connector"]["connections"] == 0
        # asking them takes one connection each
        found = await asyncio.gather(*(worker.rpc_sync(name, functions.connections) for name in names))
        assert [list(addresses) for addresses in found] == [["test"]] * 7
        for name in names:
            await worker.rpc_sync(name, functions.echo, args=(name,))
        # all to all, all at once
        everybody = [*names, "test"]
        calls = [
            worker.rpc_sync(caller, functions.relay, args=([callee], (caller, callee)))
            for caller in everybody
            for callee in everybody
            for _ in range(4)
        ]
        replies = await asyncio.gather(*calls)
        assert all(there == list(value) for there, value in replies)
        for name in names:
            addresses = await worker.rpc_sync(name, functions.connections)
            assert set(addresses) >= set(everybody) - {name}
            statistics = await worker.rpc_sync(name, functions.statistics)
            # one for each of the others, and the two ends of the one to itself
            assert statistics["connector"]["connections"] == len(everybody) - 1 + 2
            assert all(peer["connects"] == 1 for peer in statistics["peers"].values())


async def test_simultaneous_connects_end_in_one_connection(processes: Processes):
    async with processes.group("a", "b", main=functions.serve) as worker:
        for number in range(40):
            calls = [
                worker.rpc_sync(caller, functions.relay, args=([callee], number))
                for caller, callee in (("a", "b"), ("b", "a"), ("a", "b"), ("b", "a"))
            ]
            replies = await asyncio.gather(*calls)
            assert [value for _, value in replies] == [number] * 4
            for name in ("a", "b"):
                statistics = await worker.rpc_sync(name, functions.statistics)
                assert statistics["connector"]["connections"] == 2, f"{name} in round {number}"
            # both: a call on a connection that the other end has given up would fail, and rightly so
            await asyncio.gather(
                worker.rpc_sync("a", functions.hang_up_on, args=("b",)),
                worker.rpc_sync("b", functions.hang_up_on, args=("a",)),
            )


async def test_cancelling_a_call_cancels_what_it_called_in_turn(processes: Processes):
    async with processes.group("a", "b", "c", main=functions.serve) as worker:
        call = asyncio.create_task(worker.rpc_sync("a", functions.hang, args=(["b", "c"],), timeout=0))
        assert await worker.rpc_sync("c", functions.wait_for, args=("started",)) == 1
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        for name in ("a", "b", "c"):
            assert await worker.rpc_sync(name, functions.wait_for, args=("cancelled",), timeout=5) == 1
            peers = (await worker.rpc_sync(name, functions.statistics))["peers"]
            assert sum(peer["calls_in_flight"] for peer in peers.values()) == 0


async def test_a_deadline_ends_the_whole_chain(processes: Processes):
    async with processes.group("a", "b", main=functions.serve) as worker:
        begun = worker.rpc_async("b", functions.wait_for, args=("started",))
        for timeout_s in (0.3, 1.0, 3.0, 10.0):  # on a busy machine it takes longer to come to the end of the chain
            with pytest.raises(arpc.RpcTimeoutError):
                await worker.rpc_sync("a", functions.hang, args=(["b"],), timeout=timeout_s)
            await worker.rpc_sync("b", functions.echo, args=(1,))  # behind the answer, if there is one
            if begun.done():
                break
        assert await begun > 0
        for name in ("a", "b"):
            assert await worker.rpc_sync(name, functions.wait_for, args=("cancelled",), timeout=20) > 0


CALLS_WHILE_BLOCKED = 50


async def test_a_blocked_callee_slows_its_callers_only(processes: Processes, tmp_path: Path):
    options = QUICK.replace(window_bytes=8 * MIB)
    async with processes.group("blocked", "other", main=functions.serve, options=options) as worker:
        for name in ("blocked", "other"):
            await worker.rpc_sync(name, functions.echo, args=(torch.ones(MIB // 4),))
        before = await worker.rpc_sync("blocked", functions.peak_memory_bytes)
        go_on = tmp_path / "go on"
        blocking = worker.rpc_async("blocked", functions.block_loop, args=(str(go_on),))
        tensor = torch.ones(MIB // 4)
        flood = [worker.rpc_async("blocked", functions.echo, args=(tensor,)) for _ in range(256)]
        for number in range(CALLS_WHILE_BLOCKED):
            assert await worker.rpc_sync("other", functions.echo, args=(number,)) == number
            assert worker.statistics()["peers"]["blocked"]["bytes_in_flight"] <= 8 * MIB
        assert not any(call.done() for call in (blocking, *flood))
        go_on.touch()
        await blocking
        replies = await asyncio.gather(*flood)
        assert all(torch.equal(reply, tensor) for reply in replies)
        after = await worker.rpc_sync("blocked", functions.peak_memory_bytes)
        assert after - before < 100 * MIB, f"{(after - before) / MIB:.0f} MiB for a window of 8"


async def test_a_blocked_caller_does_not_fill_its_callees_memory(processes: Processes, tmp_path: Path):
    options = QUICK.replace(window_bytes=8 * MIB)
    async with processes.group("callee", "blocked", main=functions.serve, options=options) as worker:
        go_on = tmp_path / "go on"
        go_on.touch()
        await worker.rpc_sync("blocked", functions.ask_for_much_and_block, args=("callee", 1, 4 * MIB, str(go_on)))
        before = await worker.rpc_sync("callee", functions.peak_memory_bytes)
        go_on.unlink()
        arguments = ("callee", 100, 4 * MIB, str(go_on))
        blocking = worker.rpc_async("blocked", functions.ask_for_much_and_block, args=arguments)
        for number in range(CALLS_WHILE_BLOCKED):
            assert await worker.rpc_sync("callee", functions.echo, args=(number,)) == number
            await asyncio.sleep(0.01)  # for the callee to make as many replies as it will
        assert not blocking.done()
        go_on.touch()
        assert await blocking == 400 * MIB
        after = await worker.rpc_sync("callee", functions.peak_memory_bytes)
        assert after - before < 100 * MIB, f"{(after - before) / MIB:.0f} MiB for a window of 8"
