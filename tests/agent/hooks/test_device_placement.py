from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from arpc.agent.hooks.device_placement import Placement
from arpc.agent.scope import current_scope
from arpc.errors import ConfigurationError, RpcTimeoutError, SerializationError
from arpc.options import RpcOptions
from arpc.runtime import Worker
from arpc.startup import start_worker
from arpc.transport.in_process import MemoryNetwork
from tests.wire.fake_devices import FakeDevice

Maps = dict[str, dict[str, str]]
device = FakeDevice()
"""Workers of these tests are in one process, and share it."""


@pytest.fixture(autouse=True)
def new_device() -> None:
    device.__init__()  # type: ignore[misc]


class Group:
    """Starts workers of one group, each with device maps of its own, and with the device or without it."""

    def __init__(self, stack: AsyncExitStack, size: int | None) -> None:
        self._stack = stack
        self._size = size
        self._store = HashStore()
        self._network = MemoryNetwork()
        self.workers: dict[str, Worker] = {}

    async def start(self, name: str, rank: int, maps: Maps, *, has_device: bool = True) -> None:
        current_scope.set(None)
        worker = self.workers[name] = await start_worker(
            name,
            rank=None if self._size is None else rank,
            world_size=self._size,
            init_method="",
            store=self._store,
            options=RpcOptions(gc_freeze=False, device_maps=maps),
            network=self._network,
            backends={"meta": device} if has_device else {},
        )
        self._stack.push_async_callback(worker.shutdown, graceful=False)


@asynccontextmanager
async def group(maps: dict[str, Maps], *, with_device: str = "ab") -> AsyncIterator[dict[str, Worker]]:
    """Workers a and b."""
    async with AsyncExitStack() as stack:
        made = Group(stack, 2)
        starts = [
            made.start(name, rank, maps.get(name, {}), has_device=name in with_device) for rank, name in enumerate("ab")
        ]
        results = await asyncio.gather(*starts, return_exceptions=True)
        errors = [result for result in results if result is not None]
        if errors:
            raise BaseExceptionGroup("not all have started", errors)
        yield made.workers


BOTH_WAYS = {"a": {"b": {"meta": "meta"}}}


async def echo(value: Any) -> Any:
    return value


async def look(tensor: Tensor) -> tuple[str, list[float]]:
    """Where a tensor is, and what it holds."""
    return str(tensor.device), (device.get(tensor) if tensor.is_meta else tensor).tolist()


async def make(values: list[float]) -> Tensor:
    return device.put(torch.tensor(values))


def look_in_thread(tensor: Tensor) -> list[float]:
    return device.get(tensor).tolist()


# -- where tensors end up


async def test_an_argument_is_placed_by_the_map_and_the_result_by_the_map_turned_around():
    async with group(BOTH_WAYS) as workers:
        sent = device.put(torch.arange(3.0))

        assert await workers["a"].rpc_sync("b", look, args=(sent,)) == ("meta", [0, 1, 2])
        answer = await workers["a"].rpc_sync("b", echo, args=(sent,))

        assert answer.is_meta
        assert device.get(answer).tolist() == [0, 1, 2]
        assert await workers["a"].rpc_sync("b", look_in_thread, args=(sent,)) == [0, 1, 2]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.arange(100_000.0), id="large"),
        pytest.param(lambda: torch.arange(6, dtype=torch.int16).view(2, 3), id="matrix"),
        pytest.param(lambda: torch.arange(3.0).to(torch.bfloat16), id="bfloat16"),
        pytest.param(lambda: torch.empty(0, 3), id="empty"),
        pytest.param(lambda: torch.tensor(5.0), id="scalar"),
    ],
)
async def test_any_tensor_comes_back_as_it_was(make: Callable[[], Tensor]):
    content = make()
    async with group(BOTH_WAYS) as workers:
        answer = await workers["a"].rpc_sync("b", echo, args=([device.put(content), content],))

        placed, plain = answer
        assert placed.is_meta
        assert (placed.shape, placed.dtype) == (content.shape, content.dtype)
        assert torch.equal(device.get(placed), content)
        assert torch.equal(plain, content)


async def test_tensors_may_go_to_the_cpu_and_come_from_it():
    maps = {"a": {"b": {"meta": "cpu"}}, "b": {"a": {"cpu": "meta"}}}
    async with group(maps) as workers:
        assert await workers["a"].rpc_sync("b", look, args=(device.put(torch.ones(2)),)) == ("cpu", [1, 1])
        assert await workers["b"].rpc_sync("a", look, args=(torch.ones(2),)) == ("meta", [1, 1])
        assert await workers["b"].rpc_sync("a", look, args=(torch.ones(5000),)) == ("meta", [1] * 5000)
        # what is on that device there, is on the CPU here
        assert (await workers["b"].rpc_sync("a", make, args=([3.0],))).tolist() == [3.0]


async def test_results_on_the_cpu_come_to_the_device_that_is_mapped_to_it():
    async with group({"a": {"b": {"meta": "cpu"}}}, with_device="a") as workers:
        sent = device.put(torch.arange(3.0))
        answers = [
            await workers["a"].rpc_sync("b", echo, args=(sent,)),
            (await workers["a"].rpc_sync("b", echo, kwargs={"value": {"key": sent}}))["key"],
            await workers["a"].rpc_sync("b", three),
            await workers["a"].remote("b", three),
            *[item async for item in workers["a"].stream("b", streamed)],
        ]

        for answer in answers:
            assert answer.is_meta
            assert device.get(answer).tolist() == [0, 1, 2]


async def three() -> Tensor:
    return torch.arange(3.0)


async def streamed() -> AsyncIterator[Tensor]:
    yield torch.arange(3.0)


async def test_tensors_on_the_cpu_stay_there():
    async with group(BOTH_WAYS) as workers:
        assert await workers["a"].rpc_sync("b", look, args=(torch.ones(2),)) == ("cpu", [1, 1])
    assert device.log == []


async def test_calls_to_oneself_need_no_map():
    async with group({}) as workers:
        sent = device.put(torch.arange(3.0))
        answer = await workers["a"].rpc_sync("a", echo, args=(sent,))
        assert device.get(answer).tolist() == [0, 1, 2]


async def test_items_of_a_stream_are_placed():
    async with group(BOTH_WAYS) as workers:
        got = [device.get(item).tolist() async for item in workers["a"].stream("b", count_on_device, args=(3,))]
        assert got == [[0.0], [1.0], [2.0]]


async def count_on_device(items: int) -> AsyncIterator[Tensor]:
    for number in range(items):
        yield device.put(torch.tensor([float(number)]))


async def test_a_tensor_that_requires_grad_still_does():
    async with group(BOTH_WAYS) as workers:
        sent = device.put(torch.ones(2)).requires_grad_()
        assert (await workers["a"].rpc_sync("b", echo, args=(sent,))).requires_grad


# -- what is not on the map


async def test_a_tensor_with_no_place_says_what_to_do():
    async with group({"b": {"a": {"meta": "meta"}}}) as workers:
        with pytest.raises(SerializationError) as caught:
            await workers["a"].rpc_sync("b", echo, args=(device.put(torch.ones(2)),))
    text = str(caught.value)
    assert "worker 'a' has a tensor on meta for worker 'b', and no device map says where it belongs there" in text
    assert "options.set_device_map('b', {'meta': ...})" in text


async def test_a_result_with_no_place_says_what_to_do():
    async with group({}) as workers:
        with pytest.raises(SerializationError) as caught:
            await workers["a"].rpc_sync("b", make, args=([1.0],))
        assert "worker 'b' answers with a tensor on its device meta" in str(caught.value)
        assert "options.set_device_map('b', {...: 'meta'})" in str(caught.value)
        # and that is all that happens
        assert await workers["a"].rpc_sync("b", echo, args=(1,)) == 1
        assert workers["a"].statistics()["devices"]["tensors_misplaced"] == 1


# -- validation


@pytest.mark.parametrize(
    ("maps", "with_device", "text"),
    [
        ({"a": {"x": {"meta": "meta"}}}, "ab", "the device map of worker 'a' for worker 'x': there is no such worker"),
        ({"a": {"b": {"meta": "cuda:3"}}}, "ab", "worker 'b' has no device cuda:3; it has none of type cuda"),
        ({"b": {"a": {"meta": "meta"}}}, "b", "the device map of worker 'b' for worker 'a': a tensor on 'meta' has"),
    ],
)
async def test_a_map_that_cannot_be_fails_on_every_worker(maps, with_device, text):
    with pytest.raises(BaseExceptionGroup) as caught:
        async with group(maps, with_device=with_device):
            pass
    assert len(caught.value.exceptions) == 2
    for error in caught.value.exceptions:
        assert isinstance(error, ConfigurationError)
        assert text in str(error)


async def test_who_comes_later_to_an_elastic_group_is_checked_then():
    async with AsyncExitStack() as stack:
        made = Group(stack, None)
        await made.start("a", 0, {"late": {"meta": "meta"}})
        with pytest.raises(ConfigurationError, match="the device map of worker 'a' for worker 'late'"):
            await made.start("late", 1, {}, has_device=False)
        await made.start("late", 1, {})
        assert await made.workers["a"].rpc_sync("late", look, args=(device.put(torch.ones(1)),)) == ("meta", [1])


# -- the loop is not kept waiting


async def test_the_loop_goes_on_while_a_device_is_copied_from():
    async with group(BOTH_WAYS) as workers:
        device.gate.clear()
        held = workers["a"].rpc_async("b", look, args=(device.put(torch.ones(2)),))
        assert await workers["a"].rpc_sync("b", echo, args=(1,)) == 1
        assert not held.done()
        device.gate.set()

        assert await held == ("meta", [1, 1])
        assert threading.get_ident() not in device.threads


@pytest.mark.parametrize("how", ["cancel", "timeout"])
async def test_a_call_that_ends_while_it_is_copied_is_never_sent(how: str):
    async with group(BOTH_WAYS) as workers:
        device.gate.clear()
        call = workers["a"].rpc_async(
            "b", look, args=(device.put(torch.ones(2)),), timeout=0.2 if how == "timeout" else 0
        )
        if how == "cancel":
            call.cancel()
        with pytest.raises((asyncio.CancelledError, RpcTimeoutError)):
            await call
        device.gate.set()
        # the next one is behind it
        assert await workers["a"].rpc_sync("b", look, args=(device.put(torch.ones(2)),)) == ("meta", [1, 1])
        assert device.log.count("upload") == 1
        assert workers["a"].statistics()["peers"]["b"]["calls_in_flight"] == 0


async def test_a_download_that_fails_fails_the_call():
    async with group(BOTH_WAYS) as workers:
        sent = device.put(torch.ones(2))
        device.failure = RuntimeError("the device has fallen off the bus")
        with pytest.raises(SerializationError, match="fallen off the bus"):
            await workers["a"].rpc_sync("b", echo, args=(sent,))
        with pytest.raises(SerializationError, match="fallen off the bus"):
            await workers["a"].rpc_sync("b", make, args=([1.0],))
        device.failure = None
        assert await workers["a"].rpc_sync("b", look, args=(sent,)) == ("meta", [1, 1])


async def test_an_upload_that_fails_fails_the_call():
    async with group({"a": {"b": {"cpu": "meta"}}}) as workers:
        device.failure = RuntimeError("out of memory")
        with pytest.raises(SerializationError, match="worker 'b' cannot take a tensor to meta: out of memory"):
            await workers["a"].rpc_sync("b", echo, args=(torch.ones(2),))


async def test_workers_with_no_devices_and_no_maps_have_none_of_this():
    async with group({}, with_device="") as workers:
        assert workers["a"].agent.placement is None
        assert "devices" not in workers["a"].statistics()
        meta = torch.ones(2, device="meta")
        assert (await workers["a"].rpc_sync("b", echo, args=(meta,))).is_meta


# -- the mapping itself, of devices that are not here


class Somewhere:
    """As much of a tensor as says where it is."""

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)


class AnyDevice(FakeDevice):
    def download(self, tensor: Any) -> tuple[Tensor, Callable[[], None]]:
        return torch.zeros(1), lambda: None


async def test_each_device_has_its_place():
    options = RpcOptions(device_maps={"b": {"cuda:0": "cuda:1", "cuda:1": "cuda:0", "cuda:2": "cpu"}})
    placement = Placement(asyncio.get_running_loop(), "a", options, {"cuda": AnyDevice(4)})
    stager = placement.stager("b")

    def target(name: str) -> str | None:
        staged = stager.stage(Somewhere(name))  # type: ignore[arg-type]
        return None if staged is None else staged.device

    assert [target(name) for name in ("cuda:0", "cuda:1", "cuda:2")] == ["cuda:1", "cuda:0", ""]
    assert target("cpu") is None
    assert target("meta") is None
    with pytest.raises(SerializationError, match=r"tensor on cuda:3 for worker 'b'.*set_device_map\('b', {'cuda:3'"):
        target("cuda:3")
    assert placement.to_caller.stage(Somewhere("cuda:3")).device == "cuda:3"
    placement.close()
