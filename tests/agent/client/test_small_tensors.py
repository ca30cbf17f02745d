"""How many messages, and writes, tensors take."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import pytest
import torch

import arpc
from arpc.options import RpcOptions
from arpc.testing import cluster
from arpc.transport.sockets import TcpTransport
from tests.agent.client.test_isolated_tasks import run
from tests.agent.stage import echo


class CountingWrites:
    """Stands in for the transport of a connection."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.writes: list[int] = []

    def write(self, data: bytes) -> None:
        self.writes.append(len(data))
        self._transport.write(data)

    def writelines(self, parts: tuple[bytes, ...]) -> None:
        self.writes.append(sum(map(len, parts)))
        self._transport.writelines(parts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


@pytest.mark.parametrize("as_dict", [False, True])
async def test_a_thousand_small_tensors_are_one_message_with_one_write(as_dict: bool):
    options = RpcOptions(gc_freeze=False, shared_memory_bytes=0, listen=("tcp://127.0.0.1:0",))
    async with cluster(2, options=options, transports={"tcp": TcpTransport()}) as group:
        await group[0].rpc_sync("worker1", echo)
        counted = []
        for worker, other in ((group[0], "worker1"), (group[1], "worker0")):
            connection = worker.agent.known_peer(other).connection
            connection._transport = CountingWrites(connection._transport)
            connection._write = connection._transport.write
            counted.append(connection._transport)
        sent: Any = [torch.full((16,), float(number)) for number in range(1000)]
        if as_dict:
            sent = {str(number): tensor for number, tensor in enumerate(sent)}

        arrived = await group[0].rpc_sync("worker1", echo, args=(sent,))

        torch.testing.assert_close(arrived, sent)
        for transport in counted:
            (size,) = transport.writes
            assert 64_000 < size < 100_000


@arpc.export
async def take(*values: Any, **more: Any) -> Any:
    return values, more


@arpc.export
def take_in_thread(*values: Any, **more: Any) -> Any:
    return values, more


@arpc.export
@arpc.inline
def take_inline(*values: Any, **more: Any) -> Any:
    return values, more


WHOLE = torch.arange(6.0)
FEW: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "two": ((torch.ones(2), torch.zeros(3, 1)), {}),
    "the same twice": ((WHOLE, WHOLE), {}),
    "parts of one": ((WHOLE[:3], WHOLE[3:]), {}),
    "with a number": ((torch.ones(2), 3), {}),
    "in containers": (({"a": [torch.ones(2), None]}, torch.ones(1)), {}),
    "by name": ((torch.ones(2),), {"b": torch.ones(3)}),
    "none": ((), {"b": 1}),
    "one too many": (tuple(torch.ones(2) for _ in range(9)), {}),
    "one that is large": ((torch.ones(2), torch.ones(100_000)), {}),
    "one that is not plain": ((torch.ones(2), torch.eye(2).to_sparse()), {}),
}


@pytest.mark.parametrize("allow", [None, "exported"], ids=["free", "allow-list"])
@pytest.mark.parametrize("function", [take, take_in_thread, take_inline], ids=lambda function: function.__name__)
async def test_a_few_of_them_arrive_whatever_is_around_them(function: Any, allow: Any):
    async with cluster(2, options=RpcOptions(gc_freeze=False, allow=allow)) as group:
        for args, kwargs in FEW.values():
            for _ in range(2):
                values, more = await group[0].rpc_sync("worker1", function, args, kwargs)
                assert len(values) == len(args)
                for found, sent in zip([*values, *more.values()], [*args, *kwargs.values()], strict=True):
                    torch.testing.assert_close(found, sent)


async def test_what_has_memory_in_common_has_it_again():
    async with cluster(2, options=RpcOptions(gc_freeze=False)) as group:
        (first, second), _ = await group[0].rpc_sync("worker1", take, (WHOLE, WHOLE))
        assert first is second
        (low, high), _ = await group[0].rpc_sync("worker1", take, (WHOLE[:3], WHOLE[3:]))
        assert low.untyped_storage().data_ptr() == high.untyped_storage().data_ptr()


async def share(*values: Any) -> list[int]:
    """For each argument, which of them is the first that is the same object."""
    return [next(place for place, other in enumerate(values) if other is value) for value in values]


async def test_a_tensor_that_is_there_twice_is_one_object():
    x, y = torch.ones(2), torch.zeros(2)
    async with cluster(2) as group:
        for _ in range(2):
            for args, expected in (((x, x), [0, 0]), ((x, y, x), [0, 1, 0]), ((x, y, y, x), [0, 1, 1, 0])):
                assert await group[0].rpc_sync("worker1", share, args=args) == expected
        assert await group[0].rpc_sync("worker1", share, args=(x, y)) == [0, 1]
        assert await group[0].rpc_sync("worker1", take, args=(y, x, y)) is not None


async def test_tensors_of_many_kinds_take_turns():
    sent = [
        torch.ones(3),
        torch.ones(3, requires_grad=True),
        torch.ones(3, dtype=torch.float64),
        torch.ones(6)[::2],
        torch.ones(3).to_sparse(),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3, dtype=torch.complex64).conj().imag,
        torch.ones(9000),
    ]
    async with cluster(2) as group:
        for _ in range(2):
            for first in sent:
                arrived = await group[0].rpc_sync("worker1", echo, args=(first,))
                assert (arrived.dtype, arrived.layout) == (first.dtype, first.layout)
                torch.testing.assert_close(arrived.detach(), first.detach())
                for second in sent:
                    if second is not first:
                        both = await group[0].rpc_sync("worker1", share, args=(first, second))
                        assert both == [0, 1]


async def give_after_a_while(x: torch.Tensor) -> torch.Tensor:
    await asyncio.sleep(0)
    return x


def test_who_waits_for_one_goes_on_in_its_own_context_and_state():
    color = contextvars.ContextVar("color", default="none")
    seen: list[Any] = []

    async def call(here: Any) -> None:
        color.set("red")
        with torch.no_grad():
            for function in (echo, give_after_a_while, take):
                await here.rpc_sync("worker1", function, args=(torch.ones(2),))  # to learn its number
                await here.rpc_sync("worker1", function, args=(torch.ones(2),))
                seen.append((color.get(), torch.is_grad_enabled()))

    async def main(here: Any, _: Any) -> None:
        await asyncio.create_task(call(here))
        assert torch.is_grad_enabled()
        async with arpc.autograd.context() as context_id:
            x = torch.ones(2, requires_grad=True)
            result = await here.rpc_sync("worker1", echo, args=(x,))
            await arpc.autograd.backward(context_id, [result.sum()])
            assert arpc.autograd.get_gradients(context_id)[x].tolist() == [1, 1]

    run(main)
    assert seen == [("red", False)] * 3


def test_of_several_that_come_at_once_each_goes_on_with_its_own():
    async def call(here: Any, number: int) -> None:
        sent = torch.full((2,), float(number))
        assert (await here.rpc_sync("worker1", echo, args=(sent,))).tolist() == sent.tolist()

    async def main(here: Any, _: Any) -> None:
        await call(here, 0)
        await asyncio.gather(*(call(here, number) for number in range(40)))

    run(main)


def test_one_that_is_cancelled_when_its_result_comes():
    async def main(here: Any, _: Any) -> None:
        x = torch.ones(2)
        await here.rpc_sync("worker1", echo, args=(x,))
        for turns in range(8):
            task = asyncio.create_task(here.rpc_sync("worker1", echo, args=(x,)))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() or task.result().tolist() == [1, 1]
        assert (await here.rpc_sync("worker1", echo, args=(x,))).tolist() == [1, 1]
        assert not here.agent.peer("worker1").calls_in_flight

    run(main)
