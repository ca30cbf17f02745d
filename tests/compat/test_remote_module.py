"""torch.distributed.nn's names, by a worker that calls itself."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from arpc.compat import autograd as dist_autograd
from arpc.compat import rpc
from arpc.compat.remote_module import _REMOTE_MODULE_PICKLED_ATTRIBUTES, RemoteModule


def no_module() -> object:
    return object()


def attributes_of(module: RemoteModule) -> list[str]:
    return list(module.__dict__)


def forward_there(module: RemoteModule, x: torch.Tensor) -> torch.Tensor:
    return module(x)


def is_training(rref: rpc.RRef[nn.Module]) -> bool:
    return rref.local_value().training


def test_calls(alone):
    module = RemoteModule(f"{alone}/cpu", nn.Linear, args=(3, 2), kwargs={"bias": False})
    assert (module.on, module.device) == (alone, "cpu")
    x = torch.ones(3, requires_grad=True)
    (weight,) = module.remote_parameters()
    with dist_autograd.context() as context_id:
        y = module(x)
        assert torch.equal(y, module.forward_async(x).wait())
        dist_autograd.backward(context_id, [y.sum()])
        found = dist_autograd.get_gradients(context_id)
        assert torch.equal(found[weight.local_value()], torch.ones(2, 3))
    module.eval()
    assert not rpc.rpc_sync(alone, is_training, (module.get_module_rref(),))
    module.train()
    assert rpc.rpc_sync(alone, is_training, (module.get_module_rref(),))


def test_it_travels_by_rpc_alone(alone):
    module = RemoteModule("rank:0", nn.Linear, args=(3, 2))
    module.note = "stays here"
    attributes = rpc.rpc_sync(alone, attributes_of, (module,))
    assert attributes == [*_REMOTE_MODULE_PICKLED_ATTRIBUTES, "forward_async", "forward"]
    x = torch.ones(3)
    assert torch.equal(rpc.rpc_sync(alone, forward_there, (module, x)), module.forward(x))
    again = RemoteModule.init_from_module_rref(alone, module.get_module_rref())
    assert torch.equal(again.forward(x), module.forward(x))
    with pytest.raises(RuntimeError, match="Cannot pickle RemoteModule in python pickler"):
        torch.save(module, io.BytesIO())


def test_what_it_is_not(alone):
    with pytest.raises(ValueError, match=r"Expect `module_cls\(\*args, \*\*kwargs\)` returns an instance of"):
        RemoteModule(alone, no_module).forward()
    module = RemoteModule(alone, nn.Linear, args=(3, 2))
    with pytest.raises(ValueError, match="Please use ``remote_parameters`` instead"):
        module.parameters()
    for name in ("cuda", "state_dict", "register_forward_hook", "zero_grad", "extra_repr"):
        with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for RemoteModule"):
            getattr(module, name)()
    assert repr(module) == f"RemoteModule({alone}/cpu)"
