"""A module on another worker."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import pickle
from contextlib import suppress

import pytest
import torch
from torch import nn

import arpc
from arpc.nn import RemoteModule
from arpc.testing import cluster
from tests.nn import modules
from tests.nn.modules import Echo
from tests.rref.conftest import OPTIONS


@pytest.mark.parametrize("place", ["worker1/cpu", "worker1", "rank:1", "worker0"])
async def test_it_is_called_where_it_is(group, place):
    owner = "worker0" if place == "worker0" else "worker1"
    m = RemoteModule(place, Echo, args=(2.0,), kwargs={"shift": 1.0})
    assert (m.on, m.device) == (owner, torch.device("cpu"))
    x = torch.ones(2)
    for result in (await m(x, 5, word="w"), await m.forward(x, 5, word="w"), await m.forward_async(x, 5, word="w")):
        assert torch.equal(result[0], torch.full((2,), 3.0))
        assert result[1:] == (5, "w", owner, True)


async def test_an_address_creates_modules_by_calls(group):
    place = RemoteModule.at("worker1/cpu", timeout=20)
    assert repr(place) == "RemoteModule.at('worker1/cpu')"
    m = place(Echo, 2.0, shift=1.0)
    assert (m.on, m._timeout) == ("worker1", 20)
    assert torch.equal((await m(torch.ones(2)))[0], torch.full((2,), 3.0))


async def test_nothing_is_waited_for(group):
    m = RemoteModule("worker1", Echo)
    future = m.forward_async(torch.ones(1))
    assert not m.get_module_rref().confirmed_by_owner()
    assert isinstance(future, arpc.Future)
    assert (await future)[3] == "worker1"
    assert await m is m


async def test_its_methods_are_called_through_its_rref(group):
    m: RemoteModule[Echo] = RemoteModule("worker1", Echo, (3.0,))
    assert await m.get_module_rref().rpc_sync()(Echo.double) == 6.0
    with pytest.raises(AttributeError, match=r"'scale'.*worker 'worker1'.*get_module_rref\(\)"):
        _ = m.scale


async def test_a_forward_pass_may_be_a_coroutine(group):
    m = RemoteModule("worker1", modules.Later)
    assert torch.equal(await m(torch.zeros(1)), torch.ones(1))


@pytest.mark.parametrize("module", [Echo, modules.Later])
async def test_grad_mode_is_that_of_the_caller(group, module):
    m = RemoteModule("worker1", module)
    x = torch.ones(1, requires_grad=True)
    for is_enabled in (False, True):
        result = await arpc.set_grad_enabled(is_enabled)(modules.call)(m, x)
        assert (result[0] if module is Echo else result).requires_grad is is_enabled


async def test_hooks_of_the_module_run_where_it_is(group):
    assert await RemoteModule("worker1", modules.hooked, (1.0,))(torch.ones(1)) == "from a hook"


async def test_it_can_be_made_and_called_from_a_thread(group):
    result = await arpc.rpc_sync("worker2", modules.call_from_a_thread, ("worker1", torch.ones(1)))
    assert (result[0], result[3]) == (5.0, "worker1")


# -- devices


@pytest.mark.parametrize("as_later", [False, True])
async def test_module_and_inputs_are_on_the_device(group, as_later):
    m = RemoteModule("worker1/meta", modules.Where)
    if as_later:
        m = RemoteModule.from_module_rref(m.get_module_rref(), "meta")
    assert m.device == torch.device("meta")
    x = torch.ones(1)
    devices = await m(x, [x, (x, 3)], modules.Pair(x, "text"), key={"inner": x})
    assert devices == ["meta"] * 6


# -- mode


async def test_train_and_eval(group):
    m = RemoteModule("worker1", Echo)
    assert await m.eval() is m
    assert (await m(torch.ones(1)))[4] is False
    assert not m.training
    assert await m.train() is m
    assert (await m(torch.ones(1)))[4] is True
    await m.train(mode=False)
    assert (await m(torch.ones(1)))[4] is False


async def test_requires_grad(group):
    m = RemoteModule("worker1", Echo)
    assert await m.requires_grad_(False) is m
    assert await arpc.rpc_sync("worker1", modules.requires_grad, (m.get_module_rref(),)) == [False]


# -- parameters and state


async def test_parameters_are_rrefs(group):
    m = RemoteModule("worker1", nn.Sequential, (nn.Linear(2, 3), nn.Linear(3, 1, bias=False)))
    rrefs = await m.remote_parameters()
    assert [rref.owner_name() for rref in rrefs] == ["worker1"] * 3
    assert [tuple((await rref).shape) for rref in rrefs] == [(3, 2), (3,), (1, 3)]
    assert await m.remote_parameters(recurse=False) == []
    assert list(await m.remote_named_parameters()) == ["0.weight", "0.bias", "1.weight"]


async def test_the_state_is_copied_there_and_back(group):
    here = nn.BatchNorm1d(3)
    here(torch.randn(8, 3))
    m = RemoteModule("worker1", nn.BatchNorm1d, (3,))
    assert await m.load_state_dict(here.state_dict()) == ([], [])
    state = await m.state_dict()
    assert state.keys() == here.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in here.state_dict().items())
    assert not any(value.requires_grad for value in state.values())


@pytest.mark.parametrize("owner", ["worker0", "worker1"])
async def test_the_state_is_a_copy_wherever_the_module_is(group, owner):
    m = RemoteModule(owner, Echo, (2.0,))
    (await m.state_dict())["scale"].zero_()
    assert (await m.state_dict())["scale"] == 2.0


async def test_a_state_that_does_not_fit(group):
    m = RemoteModule("worker1", Echo)
    with pytest.raises(RuntimeError, match="Missing key"):
        await m.load_state_dict({"scale": torch.ones(1), "other": torch.ones(1)})
    keys = await m.load_state_dict({"scale": torch.ones(1), "other": torch.ones(1)}, strict=False)
    assert keys == (["shift"], ["other"])


# -- on the way


async def test_it_works_wherever_it_is_sent(group):
    m = RemoteModule("worker1", Echo, (2.0,), timeout=30)
    await m.eval()
    for worker in ("worker1", "worker2", "worker0"):
        assert (await arpc.rpc_sync(worker, modules.call, (m, torch.ones(1))))[3] == "worker1"
    back = await arpc.rpc_sync("worker2", modules.give_back, (m,))
    assert (await back(torch.ones(1)))[0] == 2.0
    assert await arpc.rpc_sync("worker1", modules.is_same_module, (back, m.get_module_rref()))
    assert repr(back) == repr(m) == "RemoteModule(Echo on worker1/cpu)"
    assert not back.training


async def test_attributes_that_were_added_stay_behind(group, caplog):
    m = modules.Labelled("worker1", Echo)
    m.label = "mine"
    with caplog.at_level(logging.WARNING, "arpc.nn"):
        found = await arpc.rpc_sync("worker2", modules.attributes, (m,))
    assert "label" not in found["own"]
    assert found["kind"] == "Labelled"
    assert found["on"] == "worker1"
    assert "sent without the attributes it was given: label" in caplog.text


async def test_it_cannot_be_pickled_outside_of_a_call(group):
    m = RemoteModule("worker1", Echo)
    with pytest.raises(arpc.SerializationError, match="as part of a call only"):
        pickle.dumps(m)


async def test_one_can_be_made_of_an_rref(group):
    rref = arpc.remote("worker1", Echo, (4.0,))
    for m in (RemoteModule.from_module_rref(rref), RemoteModule.init_from_module_rref("worker1/cpu", rref)):
        assert (await m(torch.ones(1)))[0] == 4.0
        assert m.get_module_rref() is rref
    with pytest.raises(arpc.ConfigurationError, match="on worker 'worker1' and not at 'worker2'"):
        RemoteModule.init_from_module_rref("worker2", rref)


async def test_the_module_lives_as_long_as_a_handle(group):
    m = RemoteModule("worker1", Echo)
    other = await arpc.rpc_sync("worker2", modules.give_back, (m,))
    del m
    assert (await other(torch.ones(1)))[3] == "worker1"


# -- what goes wrong


async def test_a_module_that_cannot_be_made_says_so_at_each_use(group):
    m = RemoteModule("worker1", modules.Broken)
    for use in (lambda: m, m, m.forward_async, m.remote_parameters, m.eval, m.state_dict, m.train):
        with pytest.raises(ValueError, match="cannot be made") as caught:
            await use()
        assert "made the RemoteModule Broken" in caught.value.__notes__[0]
        assert isinstance(caught.value.__cause__, arpc.RemoteTraceback)
        del caught
    with pytest.raises(ValueError, match="cannot be made"):
        await arpc.rpc_sync("worker2", modules.call, (m,))


async def test_what_makes_no_module(group):
    with pytest.raises(arpc.ConfigurationError, match="no_module returned int"):
        await RemoteModule("worker1", modules.no_module)
    with pytest.raises(arpc.ConfigurationError, match="a class, or of a function"):
        RemoteModule("worker1", nn.Linear(1, 1).weight)  # type: ignore[arg-type]


async def test_errors_of_the_forward_pass_are_its_own(group):
    with pytest.raises(ZeroDivisionError, match="in forward") as caught:
        await RemoteModule("worker1", modules.BrokenForward)()
    assert isinstance(caught.value.__cause__, arpc.RemoteTraceback)
    del caught


@pytest.fixture
async def _events():
    modules.Blocked.entered, modules.Blocked.cancelled = asyncio.Event(), asyncio.Event()


@pytest.mark.usefixtures("_events")
async def test_cancelling_reaches_the_forward_pass(group):
    m = RemoteModule("worker1", modules.Blocked)
    task = asyncio.create_task(m())
    await asyncio.wait_for(modules.Blocked.entered.wait(), 30)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await asyncio.wait_for(modules.Blocked.cancelled.wait(), 30)
    assert task.cancelled()


@pytest.mark.usefixtures("_events")
async def test_a_timeout_is_for_every_call(group):
    m = RemoteModule("worker1", modules.Blocked, timeout=0.05)
    with pytest.raises(arpc.RpcTimeoutError) as caught:
        await m()
    assert caught.value.__notes__ == ["in a call of the RemoteModule(Blocked on worker1/cpu)"]
    del caught


async def test_a_lost_owner():
    async with cluster(2, options=OPTIONS) as group:
        m = await RemoteModule("worker1", Echo)
        await group[1].shutdown(graceful=False)
        for use in (m.forward_async, m, m.remote_parameters):
            with pytest.raises(arpc.OwnerLostError) as caught:
                await use()
            assert caught.value.__notes__ == ["in a call of the RemoteModule(Echo on worker1/cpu)"]
            del caught
        await group.shutdown(graceful=False)


def test_it_needs_a_worker():
    with pytest.raises(arpc.NotInitializedError):
        contextvars.Context().run(RemoteModule, "worker1", Echo)
