"""Torch's modes in handlers: each has its own across every wait, and never sees that of another."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

import arpc
from arpc import torchstate
from arpc.testing import cluster
from tests.agent.leftovers import assert_nothing_left, warm_up
from tests.agent.stage import hold, the_stage, wait_if

pytestmark = pytest.mark.usefixtures("nothing_switched")


def torch_state() -> dict[str, Any]:
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "device": torch.empty(0).device.type,
    }


DEFAULT_STATE = {"grad": True, "inference": False, "autocast": False, "device": "cpu"}

MODES = {
    "no_grad": (torch.no_grad, {"grad": False}),
    "arpc.no_grad": (arpc.no_grad, {"grad": False}),
    "inference_mode": (torch.inference_mode, {"inference": True, "grad": False}),
    "arpc.inference_mode": (arpc.inference_mode, {"inference": True, "grad": False}),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), {"autocast": True}),
    "device": (lambda: torch.device("meta"), {"device": "meta"}),
}


async def look_at_torch() -> dict[str, Any]:
    return torch_state()


async def look_at_torch_later() -> dict[str, Any]:
    await asyncio.sleep(0)
    return torch_state()


def look_at_torch_in_thread() -> dict[str, Any]:
    return torch_state()


@arpc.inline
def look_at_torch_inline() -> dict[str, Any]:
    return torch_state()


async def look_at_torch_in_async_generator():
    yield torch_state()
    await asyncio.sleep(0)
    yield torch_state()


def look_at_torch_in_generator():
    yield torch_state()
    yield torch_state()


def hand_out_a_coroutine() -> Any:
    return look_at_torch()


class TellsGradMode:
    """Arrives as whether gradients were on when it was pickled, in the runtime's own hands."""

    def __reduce__(self) -> Any:
        return bool, (torch.is_grad_enabled(),)


async def give_teller() -> TellsGradMode:
    return TellsGradMode()


async def give_teller_later() -> TellsGradMode:
    await asyncio.sleep(0)
    return TellsGradMode()


def give_teller_in_thread() -> TellsGradMode:
    return TellsGradMode()


LOOKERS = [
    look_at_torch,
    look_at_torch_later,
    look_at_torch_in_thread,
    look_at_torch_inline,
    look_at_torch_in_async_generator,
    look_at_torch_in_generator,
    hand_out_a_coroutine,
]


async def states_seen(worker: arpc.Worker) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []
    for looker in LOOKERS:
        if "generator" in looker.__name__:
            seen += [state async for state in worker.stream("worker1", looker)]
        else:
            seen.append(await worker.rpc_sync("worker1", looker))
    return seen


async def hold_in_mode(mode: str) -> dict[str, Any]:
    """Waits in a mode while others run, then looks whether it is still in it."""
    stage = the_stage()
    enter, _ = MODES[mode]
    with enter():
        stage.reached(f"{mode} entered")
        await stage.pass_gate()
        inside = torch_state()
    assert torch_state() == DEFAULT_STATE
    return inside


@pytest.mark.parametrize("mode", MODES)
async def test_a_mode_of_a_handler_that_waits_is_its_own(pair, stage, mode):
    future = pair[0].rpc_async("worker1", hold_in_mode, args=(mode,))
    await stage.wait_until(f"{mode} entered")
    assert torch_state() == DEFAULT_STATE, "the test itself is not in that mode"
    for seen in await states_seen(pair[0]):
        assert seen == DEFAULT_STATE
    stage.open()
    assert await future == DEFAULT_STATE | MODES[mode][1]
    assert torchstate.is_pristine()


async def test_modes_of_many_handlers_interleave(pair, stage):
    futures = {mode: pair[0].rpc_async("worker1", hold_in_mode, args=(mode,)) for mode in [*MODES, *reversed(MODES)]}
    await stage.wait_until(*(f"{mode} entered" for mode in MODES))
    stage.open()
    for mode, future in futures.items():
        assert await future == DEFAULT_STATE | MODES[mode][1]
    assert torchstate.is_pristine()


async def switch_grad_off_for_good(wait: bool) -> None:
    await wait_if(wait)
    torch.set_grad_enabled(False)


async def set_device_for_good(wait: bool) -> None:
    await wait_if(wait)
    torch.set_default_device("meta")


@arpc.inline
def switch_inline_for_good(wait: bool) -> None:
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")


@pytest.mark.parametrize("switch", [switch_grad_off_for_good, set_device_for_good, switch_inline_for_good])
async def test_what_a_handler_leaves_switched_ends_with_it(pair, wait_first, switch):
    await warm_up(pair)
    switched = pair[0].rpc_async("worker1", switch, args=(wait_first,))
    looked = pair[0].rpc_async("worker1", look_at_torch)
    await switched
    assert await looked == DEFAULT_STATE, "a handler of the same read"
    assert torch_state() == DEFAULT_STATE, "the code of the test"
    for seen in await states_seen(pair[0]):
        assert seen == DEFAULT_STATE


async def test_a_main_task_that_waits_in_a_mode_does_not_reach_handlers(pair):
    """This loop has no task factory of ours, so the mode is on the thread while the test waits."""
    assert asyncio.get_running_loop().get_task_factory() is None
    with torch.no_grad():
        for seen in await states_seen(pair[0]):
            assert seen == DEFAULT_STATE
        assert not torch.is_grad_enabled(), "its own mode is still on"
        for give in (give_teller, give_teller_later, give_teller_in_thread):
            assert await pair[0].rpc_sync("worker1", give) is True, "results are packed with a clean state as well"
    assert torch.is_grad_enabled()


async def test_a_main_task_that_waits_in_a_mode_does_not_reach_handlers_that_had_to_wait(stage):
    options = arpc.RpcOptions(max_handlers_per_peer=1, gc_freeze=False)
    async with cluster(2, options=options) as group:
        await warm_up(group)
        first = group[0].rpc_async("worker1", hold)
        await stage.wait_until("held begun")
        others = [group[0].rpc_async("worker1", look) for look in LOOKERS if "generator" not in look.__name__]
        with torch.no_grad():
            stage.open()
            await first
            for seen in await asyncio.gather(*others):
                assert seen == DEFAULT_STATE
            assert not torch.is_grad_enabled()
        await assert_nothing_left(group)
    assert torchstate.is_pristine()


def test_with_the_task_factory_modes_stay_in_their_tasks(make_stage):
    async def main() -> None:
        stage = make_stage()
        async with cluster(2) as group:
            for switch in (switch_grad_off_for_good, set_device_for_good, switch_inline_for_good):
                await group[0].rpc_sync("worker1", switch, args=(False,))
            with torch.no_grad():
                for seen in await states_seen(group[0]):
                    assert seen == DEFAULT_STATE
                future = group[0].rpc_async("worker1", hold_in_mode, args=("inference_mode",))
                await stage.wait_until("inference_mode entered")
                assert not torch.is_grad_enabled()
                assert not torch.is_inference_mode_enabled()
                stage.open()
                assert await future == DEFAULT_STATE | MODES["inference_mode"][1]
            await assert_nothing_left(group)

    arpc.run(main)
    assert torchstate.is_pristine()


async def test_a_generator_keeps_its_mode_from_item_to_item(pair):
    for function in (generate_in_mode, generate_in_mode_later):
        seen = [grad async for grad in pair[0].stream("worker1", function, window=1)]
        assert seen == [False] * 5 + [True]
    assert torchstate.is_pristine()


def generate_in_mode():
    with torch.no_grad():
        for _ in range(5):
            yield torch.is_grad_enabled()
    yield torch.is_grad_enabled()


async def generate_in_mode_later():
    with torch.no_grad():
        for _ in range(5):
            yield torch.is_grad_enabled()
            await asyncio.sleep(0)
    yield torch.is_grad_enabled()
