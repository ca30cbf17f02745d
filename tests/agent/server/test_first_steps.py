"""The first step of a handler, which runs within the read that brought the request: how it ends, and what it leaves."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
import torch

from arpc.agent.scope import current_scope
from arpc.errors import SerializationError, WorkerLostError
from arpc.wire.frames import frame
from arpc.wire.messages import MessageType
from tests.agent.leftovers import assert_nothing_left, until, until_ready
from tests.agent.stage import echo

KEPT: list[weakref.ref[object]] = []


class Weighty:
    """Something that can be watched."""


async def nothing() -> None:
    """Ends in its first step."""


async def fail() -> None:
    raise LookupError("in the first step")


async def fail_later() -> None:
    await asyncio.sleep(0)
    raise LookupError("in a later step")


async def wait_once() -> str:
    await asyncio.sleep(0)
    return "waited"


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


async def switch_gradients_off() -> None:
    torch.set_grad_enabled(False)


async def are_gradients_on() -> bool:
    return torch.is_grad_enabled()


async def cancel_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def caller_name() -> str | None:
    scope = current_scope.get()
    return None if scope is None or scope.caller is None else scope.caller.name


async def keep_and_return() -> int:
    value = Weighty()
    KEPT.append(weakref.ref(value))
    return 1


async def twice(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


@pytest.fixture
async def warm(pair):
    """A pair whose callee lets handlers begin within the read, where it can."""
    await pair[0].rpc_sync("worker1", nothing)
    await until_ready(pair[1])
    return pair


async def test_what_waits_after_what_ended_and_what_ended_after_what_failed(warm):
    call = warm[0].rpc_sync
    for _ in range(3):
        assert await call("worker1", nothing) is None
        with pytest.raises(LookupError, match="in the first step"):
            await call("worker1", fail)
        assert await call("worker1", wait_once) == "waited"
        with pytest.raises(LookupError, match="in a later step"):
            await call("worker1", fail_later)
        await until_ready(warm[1])
    statistics = warm[1].agent.dispatcher.statistics()
    assert statistics["calls_handled"] == 2 + 3 * 4
    assert statistics["calls_failed"] == 6
    await assert_nothing_left(warm)


async def test_the_traceback_begins_with_the_handler(warm):
    with pytest.raises(LookupError) as raised:
        await warm[0].rpc_sync("worker1", fail)
    assert "in fail" in str(raised.value.__cause__)
    assert "eager_tasks.py" not in str(raised.value.__cause__)


async def test_one_that_waits_is_cancelled_with_its_caller(warm):
    task = asyncio.create_task(warm[0].rpc_sync("worker1", wait_for_ever))
    await until(lambda: warm[1].agent.dispatcher.tasks.statistics()["handlers_waiting"] == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: warm[1].agent.dispatcher.tasks.statistics()["handlers_waiting"] == 0)
    await assert_nothing_left(warm)


async def test_what_a_handler_leaves_switched_off_ends_with_it(warm):
    await warm[0].rpc_sync("worker1", switch_gradients_off)
    assert torch.is_grad_enabled()
    assert await warm[0].rpc_sync("worker1", are_gradients_on)


async def test_a_handler_that_cancels_itself_does_not_reach_the_next(warm):
    for _ in range(3):
        await warm[0].rpc_sync("worker1", cancel_itself)
        assert await warm[0].rpc_sync("worker1", wait_once) == "waited"


async def test_each_runs_in_its_own_scope(warm):
    assert await warm[0].rpc_sync("worker1", caller_name) == "worker0"


async def test_nothing_of_a_handler_is_kept_until_the_next(warm):
    KEPT.clear()
    assert await warm[0].rpc_sync("worker1", keep_and_return) == 1
    gc.collect()
    assert KEPT[0]() is None


# -- a tensor and nothing else


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(16.0), torch.ones(2, 3, 4), torch.tensor(5), torch.ones(2, 2).t(), torch.ones(1 << 20)],
    ids=["floats", "three dimensions", "no dimension", "transposed", "too large"],
)
async def test_one_tensor_there_and_back(warm, tensor):
    for _ in range(2):
        assert torch.equal(await warm[0].rpc_sync("worker1", twice, args=(tensor,)), tensor * 2)
    peer = warm[0].agent.known_peer("worker1")
    assert peer.in_flight_bytes == 0
    await assert_nothing_left(warm)


async def test_one_tensor_counts_in_the_window(warm):
    peer = warm[0].agent.known_peer("worker1")
    task = asyncio.create_task(warm[0].rpc_sync("worker1", echo, args=(torch.arange(16.0),)))
    await asyncio.sleep(0)
    assert peer.in_flight_bytes > 64
    await task
    assert peer.in_flight_bytes == 0


async def test_a_malformed_tensor_fails_its_call_and_ends_the_connection(warm, caplog):
    task = asyncio.create_task(warm[0].rpc_sync("worker1", wait_for_ever))
    await until(lambda: warm[1].agent.dispatcher.tasks.statistics()["handlers_waiting"] == 1)
    ((call_id, _),) = warm[0].agent.known_peer("worker1").calls
    (link,) = warm[1].agent.connector._links.values()
    no_table = b"\x02\xff" + bytes(14)
    link.connection.send(frame(MessageType.REPLY, 0, call_id, 0, 0, b"", b"", no_table, ()))
    with pytest.raises((SerializationError, WorkerLostError)):
        await task
