"""What makes no sense for a module that is elsewhere raises, and says what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import arpc
from arpc.nn import RemoteModule
from arpc.nn.refusals import RefusingModule

OWN = {
    # of RemoteModule
    "forward",
    "train",
    "eval",
    "requires_grad_",
    "state_dict",
    "load_state_dict",
    "extra_repr",
    # asked by torch itself while it loads the state of a model that has one as a part
    "get_extra_state",
    "set_extra_state",
    # no methods
    "T_destination",
    "call_super_init",
    "dump_patches",
}
REFUSED = sorted(name for name in vars(RefusingModule) if not name.startswith("_"))


def test_every_method_of_a_module_is_thought_of():
    methods = {name for name in dir(nn.Module) if not name.startswith("_")}
    assert methods - OWN - set(REFUSED) == set()


async def test_it_says_what_to_do(group):
    m = RemoteModule("worker1", nn.Linear, (1, 1))
    for name in REFUSED:
        with pytest.raises(arpc.UnsupportedError, match=rf"has no {name}\(\).*: \w+"):
            getattr(m, name)("anything")


async def test_some_of_the_hints(group):
    m = RemoteModule("worker1", nn.Linear, (1, 1))
    with pytest.raises(ValueError, match=r"await m.remote_parameters\(\)"):
        m.parameters()
    with pytest.raises(ValueError, match="hooks run where the module does"):
        m.register_forward_hook(print)
    with pytest.raises(ValueError, match="part of the address"):
        m.to("cpu", dtype=torch.int32)
