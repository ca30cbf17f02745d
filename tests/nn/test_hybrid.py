"""Models with parts here and parts elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import arpc
from arpc.nn import RemoteModule, parameter_rrefs
from tests.nn.modules import Echo


class Hybrid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.parts = nn.ModuleList([RemoteModule("worker1", Echo, (2.0,)), RemoteModule("worker2", Echo, (3.0,))])
        self.again = self.parts[0]
        self.last = nn.Linear(2, 1, bias=False)

    async def forward(self, x: Tensor) -> tuple[Tensor, list[bool]]:
        x = self.first(x)
        modes = []
        for part in self.parts:
            x, _, _, _, mode = await part(x)
            modes.append(mode)
        return self.last(x), modes


async def test_it_is_called_like_any_other(group):
    model = Hybrid()
    y, _ = await model(torch.ones(1, 2))
    expected = model.last(model.first(torch.ones(1, 2)) * 6)
    assert torch.allclose(y, expected)
    assert "RemoteModule(Echo on worker1/cpu)" in repr(model)


async def test_its_mode_reaches_the_remote_parts(group):
    model = Hybrid()
    model.eval()
    assert (await model(torch.ones(1, 2)))[1] == [False, False]
    model.train()
    assert (await model(torch.ones(1, 2)))[1] == [True, True]


async def test_its_parameters_must_not_be_taken_for_all(group):
    model = Hybrid()
    with pytest.raises(arpc.UnsupportedError, match=r"await arpc.nn.parameter_rrefs\(model\)"):
        list(model.parameters())
    with pytest.raises(arpc.UnsupportedError, match=r"await m.state_dict\(\)"):
        model.state_dict()


async def test_all_parameters_as_rrefs(group):
    model = Hybrid()
    rrefs = await parameter_rrefs(model)
    assert [rref.owner_name() for rref in rrefs] == ["worker0", "worker0", "worker1", "worker2", "worker0"]
    assert await rrefs[0].local_value() is model.first.weight
    assert await rrefs[4].local_value() is model.last.weight
    assert (await rrefs[2]) == 2.0
    alone = RemoteModule("worker1", Echo)
    assert len(await parameter_rrefs(alone)) == 1
